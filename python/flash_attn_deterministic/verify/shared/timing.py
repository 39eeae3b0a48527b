"""Timing of calls in turns, on a GPU or a CPU, and their memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache
_ROTATED_BYTES = 512 * 2**20  # the same
_CALLS = 8  # of a graph, at least
_ROUNDS = 5  # within a budget, at least
_FLUSHES = 8  # longer than the host needs for a forward and backward through autograd

Step = Callable[[int], object]  # a call on one of several sets of buffers


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns median, 10th and 90th percentile of at least two values, in milliseconds.

    Of values that are not all finite, all three are NaN: sorting would hide some places of a NaN.
    """
    if not all(map(math.isfinite, values)):
        return dict.fromkeys(("median", "p10", "p90"), math.nan)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {
        "median": round(statistics.median(values), 5),
        "p10": round(deciles[0], 5),
        "p90": round(deciles[-1], 5),
    }


def rotations(names: Iterable[str], rounds: int) -> Iterator[tuple[int, list[str]]]:
    """Yields each round and its order of names; each name comes first equally often."""
    order = list(names)
    for turn in range(rounds):
        yield turn, order
        order = order[1:] + order[:1]


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3, flushes: int = 1
) -> dict[str, list[float]]:
    """Times calls in turns, so that changes of the clock rate affect all equally.

    Returns milliseconds of each timed call by name; each of `repeats` rounds runs every call once,
    on the current stream. The L2 cache is overwritten before each call, `flushes` times. This also
    gives the GPU work while the host prepares the call: 0.1 ms on an H100 each time, so that slow
    host code needs several.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for turn, order in rotations(calls, warmup + repeats):
        for name in order:
            begin, end = _event(), _event()
            for _ in range(flushes):
                flush.fill_(turn)
            begin.record()
            calls[name]()
            end.record()
            if turn >= warmup:
                events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) for b, e in pairs] for name, pairs in events.items()}


def within(
    calls: Mapping[str, Callable[[], object]], budget_ms: float, most: int
) -> dict[str, list[float]]:
    """Times calls in turns, as often as milliseconds for all timed calls together allow.

    There are at least 5 rounds whatever they take, at most `most`. Of calls through autograd the
    host takes up to 0.8 ms.
    """
    trial = interleaved(calls, repeats=2, warmup=1, flushes=_FLUSHES)
    round_ms = sum(min(times) + _FLUSHES * 0.1 for times in trial.values())
    repeats = round(min(most, max(_ROUNDS, budget_ms / round_ms)))
    return interleaved(calls, repeats=repeats, warmup=1, flushes=_FLUSHES)


def on_cpu(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Times calls in turns by the host's clock; returns milliseconds of each call, per name."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _, order in rotations(calls, repeats):
        for name in order:
            begin = time.perf_counter()
            calls[name]()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def peak_memory(call: Callable[[], object]) -> int:
    """Returns the most bytes that a call had allocated at once, its results included."""
    call()  # what is allocated once, such as cuBLAS's workspace, does not count
    gc.collect()  # garbage that is freed within the call would hide what it allocates
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def rotation(kv_bytes: int) -> tuple[int, int]:
    """Returns how many caches a graph reads in turns, and how many calls it holds.

    There are several caches where one would fit in the L2 cache.
    """
    sets = max(1, -(-_ROTATED_BYTES // kv_bytes))
    return sets, sets * max(1, -(-_CALLS // sets))


def time_graphs(
    steps: Mapping[str, Step],
    sets: int,
    calls: int,
    timer: Callable[[Mapping[str, Callable[[], object]]], dict[str, list[float]]],
) -> dict[str, dict[str, float]]:
    """Times steps through CUDA graphs of so many calls over sets of buffers; see `rotation`.

    `timer` is `interleaved` or `within`, with its other arguments. Returns the `summary` of the
    milliseconds of one call, by name.
    """
    graphs = {name: capture(step, sets, calls) for name, step in steps.items()}
    timed = timer({name: graph.replay for name, graph in graphs.items()})
    return {name: summary([ms / calls for ms in values]) for name, values in timed.items()}


def capture(step: Step, sets: int, calls: int) -> torch.cuda.CUDAGraph:
    """Captures calls of a step, over all sets of buffers in turns."""
    step(0)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            step(call % sets)
    return graph
