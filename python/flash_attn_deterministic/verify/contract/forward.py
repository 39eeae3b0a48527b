"""Checks of how a row is computed: repeats, batch, cuts of the queries, heads, schedule, splits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..shared.bits import bits
from . import layouts
from .call import Attention, Call, Tensors, part
from .check import (
    Case,
    Mismatch,
    case_of,
    cases_of,
    expect_different,
    expect_numbers,
    expect_same,
    make,
)
from .device_override import device_override
from .sizes import Size

# --- run-to-run ---------------------------------------------------------------------------------


def run_to_run(case: Case, attention: Attention, size: Size) -> None:
    call = make(case, attention, size, seqlen_k=min(size.seqlen, 1100))
    repeat(call, call, size.device, size.repeats)
    if size.device == "cuda":
        _other_stream(call)
        if case.feature in _CAPTURED:
            _graph_replay(call)


_CAPTURED = ("full", "everything-causal")  # torch collects garbage before each capture: slow


def repeat(call: Call, run: Callable[[], Tensors], device: str, times: int) -> Tensors:
    """Runs and repeats a call; on a GPU other work runs at the same time."""
    expected = run()
    expect_numbers(call, "the first run", expected)
    for number in range(times):
        with _busy(device):
            again = run()
        if any(bool((bits(again[n]) != bits(expected[n])).any()) for n in expected):
            expect_same(call, f"repeat {number + 1} against the first run", again, expected)
    return expected


@contextmanager
def _busy(device: str) -> Iterator[None]:
    """Runs other work on another stream, for at least as long as the block."""
    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call, unused-ignore]
            other = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
            for _ in range(2):
                other = other @ other
    yield
    if device == "cuda":
        torch.cuda.synchronize()


def _other_stream(call: Call) -> None:
    expected = call()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = call()
    torch.cuda.current_stream().wait_stream(stream)
    expect_same(call, "another stream against the default one", other, expected)


def _graph_replay(call: Call) -> None:
    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for number in range(3):
        for tensor in captured.values():
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expect_same(call, f"replay {number + 1} of a CUDA graph against a call", captured, expected)


# --- batch --------------------------------------------------------------------------------------


def batch(case: Case, attention: Attention, size: Size) -> None:
    largest = max(size.batches)
    call = make(case, attention, size, batch=largest, seqlen_k=min(size.seqlen, 1025))
    alone: dict[int, Tensors] = {}
    for count in size.batches:
        together = call.sequences(slice(0, count))()
        for place in sorted({0, count // 2, count - 1}):
            if place not in alone:
                alone[place] = call.sequences([place])()
            what = f"place {place} of a batch of {count} against the sequence alone"
            expect_same(call, what, part(together, b=[place]), alone[place])
    order = [place for place in (2, 0, 3, 1) if place < largest]
    permuted = call.sequences(order)()
    for place, index in enumerate(order):
        what = f"sequence {index} at place {place} of {len(order)} against the sequence alone"
        expect_same(call, what, part(permuted, b=[place]), call.sequences([index])())


# --- chunk --------------------------------------------------------------------------------------


def chunk_cases(size: Size) -> Iterable[Case]:
    return cases_of(size, size.causal_features, split_size=(*size.splits, 0))


def chunk(case: Case, attention: Attention, size: Size) -> None:
    seqlen = min(size.seqlen, 2200)
    call = make(case, attention, size, batch=1, seqlen_q=seqlen, seqlen_k=seqlen)
    whole = call()
    ends = {0, *(length for length in size.lengths if length < seqlen), seqlen}
    for begin, end in itertools.pairwise(sorted(ends)):
        one = call.queries(begin, end).keys(end)
        what = f"queries [{begin}, {end}) over keys [0, {end}) against those rows of the prefill"
        expect_same(one, what, one(), part(whole, q=slice(begin, end)))


# --- decode -------------------------------------------------------------------------------------


def decode_cases(size: Size) -> Iterable[Case]:
    return cases_of(size, size.causal_features, split_size=size.splits)


def decode(case: Case, attention: Attention, size: Size) -> None:
    """Row t of a prefill, against one query over t + 1 keys, and against a step over a cache."""
    longest = size.lengths[-1]
    call = make(case, attention, size, batch=1, seqlen_q=longest, seqlen_k=longest)
    whole = call()
    last = [length - 1 for length in size.lengths]
    steps = call.sequences([0] * len(last))
    steps = replace(steps, q=call.q[0, last].unsqueeze(1), dout=call.dout[0, last].unsqueeze(1))
    parts = layouts.cached(steps, size.lengths, room=longest + 60, new=1)
    for place, (t, (one, own)) in enumerate(zip(last, parts, strict=True)):
        expected = part(whole, q=slice(t, t + 1))
        if place % 3 == 0:
            what = f"one query over {t + 1} keys against row {t} of the prefill"
            expect_same(one, what, one(), expected)
        what = f"a step that appends token {t} to its cache against the prefill"
        expect_same(one, what, own, {**expected, "k_cache": one.k, "v_cache": one.v})


# --- heads --------------------------------------------------------------------------------------


def head_groups(case: Case, attention: Attention, size: Size) -> None:
    call = make(case, attention, size, seqlen_k=min(size.seqlen, 1100), nheads=12, nheads_k=4)
    together = call()
    for begin, end in ((0, 1), (1, 2), (3, 4), (1, 3), (0, 3)):
        alone = call.kv_heads(begin, end)
        what = f"KV heads [{begin}, {end}) with their queries alone against all 4 together"
        expect_same(alone, what, alone(), part(together, h=slice(3 * begin, 3 * end)))
    k, v = (t.repeat_interleave(3, dim=2) for t in (call.k, call.v))
    repeated = replace(call, k=k, v=v)
    expect_same(repeated, "repeated keys and values against shared ones", repeated(), together)


# --- schedule -----------------------------------------------------------------------------------


def schedule_cases(size: Size) -> Iterator[Case]:
    for case in cases_of(
        size, size.features, seqlen_q=(1, 5, 16, 17, 64, 129, 1000, 4096), split_size=size.splits
    ):
        if case["seqlen_q"] < 4096 or case.head_dim == 64:  # the longest with one head dim only
            yield case


def one_path(size: Size) -> str:
    """Returns why there is one path only; "" if there may be two."""
    return "the CPU has one path only" if size.device == "cpu" else ""


_SHARED_BYTES = 166_000  # what every head dim can do with
_FEW_ROWS = 16  # up to here a kernel of its own runs
_MANY_ROWS = 128


def schedule(case: Case, attention: Attention, size: Size) -> None:
    """A sequence alone, and often enough to give each multiprocessor row blocks of its own.

    A few queries are the last of many, and are then compared with themselves alone.
    """
    few = case["seqlen_q"] if case["seqlen_q"] <= _FEW_ROWS else 0
    seqlen_q = _MANY_ROWS if few else case["seqlen_q"]
    seqlen_k = 2049 if seqlen_q < 2049 else 4097
    call = make(case, attention, size, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=4)
    gpu = torch.cuda.get_device_properties(0)
    row_blocks = -(-seqlen_q // 128) * 2  # two KV heads
    often = call.sequences([0] * (2 * gpu.multi_processor_count // row_blocks + 1))
    # Alone it may fill the GPU with a thread block per row block.
    with device_override("path=parts"):
        path, alone = call.plan.path, call()
    # On Hopper parts may be faster for both: heads of a group share tiles.
    with device_override("path=one_cta"):
        paths, together = (path, often.plan.path), often()
    # Where one thread block's state does not fit its shared memory there is one path only.
    small = 0 < getattr(gpu, "shared_memory_per_block_optin", 0) < _SHARED_BYTES
    if paths != ("parts", "one-cta") and not (
        small and case.head_dim > 96 and paths == ("parts", "parts")
    ):
        raise Mismatch(
            "the two calls did not take the two paths of the kernels: alone "
            f"{paths[0]}, {often.q.shape[0]} times {paths[1]}",
            call,
        )
    for place in (0, often.q.shape[0] // 2, often.q.shape[0] - 1):
        what = f"place {place} of {often.q.shape[0]} against the same alone"
        expect_same(call, what, part(together, b=[place]), alone)
    if few:
        last = call.queries(seqlen_q - few, seqlen_q)
        what = f"the last {few} queries alone against themselves among {seqlen_q}"
        expect_same(last, what, last(), part(alone, q=slice(seqlen_q - few, None)))


# --- split-size ---------------------------------------------------------------------------------


_ROWS = 32


def split_size_cases(size: Size) -> Iterator[Case]:
    for (head_dim, dtype), split in itertools.product(size.configs, size.splits):
        for often in (0, 1) if size.device == "cuda" else (0,):
            yield case_of(head_dim, dtype, "full", {"split_size": split, "often": often})


def split_size(case: Case, attention: Attention, size: Size) -> None:
    """The tree is cut at multiples of split_size from the sequence's start, and nowhere else.

    With a window of half a split, a row whose window lies in one split has the bits of no splitting
    at all: a hidden split changes nothing. Rows whose window holds a boundary have others.
    """
    split = case["split_size"]
    seqlen, left = min(size.seqlen, 3 * split + split // 2), split // 2
    call = make(case, attention, size, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, nheads=4)
    call = call.with_options(window_size=(left, 0))
    if case["often"]:  # the path without scratch memory
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        call = call.sequences([0] * (sms // -(-seqlen // 128) + 1))
    cut, whole = call(), call.with_options(split_size=0)()
    for begin in range(0, seqlen, split):
        # The rows up to `inside` see across the boundary at `begin`, those after it do not.
        inside = min(begin + left if begin else 0, seqlen)
        end = min(begin + split, seqlen)
        if inside < end:
            rows = slice(inside, end)
            what = (
                f"rows [{inside}, {end}), whose keys lie in one split of {split}, against no splits"
            )
            expect_same(call, what, part(cut, q=rows), part(whole, q=rows))
        if begin and inside - begin >= _ROWS:  # a few rows could agree by chance
            rows = slice(begin, inside)
            what = f"rows [{begin}, {inside}), which see across {begin}, against no splits"
            expect_different(call, what, part(cut, q=rows), part(whole, q=rows))
