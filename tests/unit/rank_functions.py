"""Functions that tests run on every rank of a pool, by name."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import os
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import flash_attn_deterministic
import torch
import torch.distributed as dist
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic import tree
from flash_attn_deterministic.distributed import agreement, ops, passes, ring_flash_attn
from flash_attn_deterministic.distributed.agreement import VARIABLE
from flash_attn_deterministic.distributed.ranks import Pending, Ranks
from flash_attn_deterministic.verify.ranks import run, trial
from flash_attn_deterministic.verify.ranks.cases import Case

Tensors = list[torch.Tensor]

# Any, because the type checker can't match unpacked arguments.
package: Any = flash_attn_deterministic
distributed: Any = flash_attn_deterministic.distributed
ring: Any = ring_flash_attn


def outcomes(cases: list[Case]) -> list[dict[str, Any]]:
    """Returns the differences on any rank, for each case; some cut sequences into chunks."""
    return [_outcome(case, chunk) for case, chunk in zip(cases, itertools.cycle(CHUNKS))]


# Rows of a chunk: with the last, a test's sequence is one.
CHUNKS = (8, 16, 4096)


def _outcome(case: Case, chunk: int = 16) -> dict[str, Any]:
    with patch.multiple(tree, CHUNK_ROWS=chunk):
        return run.outcome_of(case, "cpu")


def outcome_without(case: Case, what: str) -> dict[str, Any]:
    """Returns the differences when a part is broken, which has to cause some."""
    module: Any = passes
    broken: Any = _no_sums
    name = "_gradients"
    if what == "rounded sums":
        broken = _rounded_sums
    elif what == "alignment":
        module, name, broken = ops, "KEY_BLOCK", 1
        case = dataclasses.replace(case, split_size=0)
    with patch.object(module, name, broken):
        return _outcome(case)


def _no_sums(*arguments: Any, sums: bool = False) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = _BACKWARD(*arguments, sums=sums)
    return (dq, torch.zeros_like(dk), torch.zeros_like(dv)) if sums else (dq, dk, dv)


def _rounded_sums(*arguments: Any, sums: bool = False) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = _BACKWARD(*arguments, sums=sums)
    return dq, dk.bfloat16().to(dk.dtype), dv.bfloat16().to(dv.dtype)


_BACKWARD: Any = passes._gradients


def on_first(function: Any) -> Any:
    """Makes a function take the number of ranks that run it, and with `group` their group."""

    @functools.wraps(function)
    def run(ranks: int, *args: Any) -> Any:
        group = trial.group_of(ranks)
        return function({"group": group}, *args) if dist.get_rank() < ranks else None

    return run


def _whole(seqlen: int, batch: int = 1, packed: bool = False) -> Tensors:
    """Returns q, k, v and dout of a dense call, or of packed sequences."""
    tensors = [
        normal(batch, seqlen, heads, 16, seed=number) for number, heads in enumerate((4, 2, 2, 4))
    ]
    return [one[0] for one in tensors] if packed else tensors


def _gradients(function: Any, inputs: Tensors) -> Tensors:
    *qkv, dout = inputs
    leaves = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def _same(one: Any, over: Any, inputs: Tensors, dim: int = 1, **cut: Any) -> list[bool]:
    """Compares out and gradients over ranks with those of one device.

    Args:
        one: function of q, k and v on one device.
        over: the same over ranks.
        inputs: q, k, v and dout, whole.
        dim: that of tokens.
        cut: arguments of `shard`.
    """
    expected = _gradients(one, inputs)
    found = _gradients(over, [distributed.shard(one, dim, **cut) for one in inputs])
    pairs = zip(expected, found, strict=True)
    return [bits_equal(distributed.shard(one, dim, **cut), other) for one, other in pairs]


causal_on_one = functools.partial(package.flash_attn_func, causal=True)


@on_first
def checkpointed(cut: dict[str, Any]) -> list[bool]:
    """Compares a checkpointed call with one device."""
    cut["order"] = "zigzag"
    function = functools.partial(distributed.flash_attn_func, causal=True, **cut)
    contexts = {"use_reentrant": False, "context_fn": package.checkpoint_contexts}

    def through(*qkv: torch.Tensor) -> Any:
        with package.deterministic_mode(split_size=64):
            return torch.utils.checkpoint.checkpoint(function, *qkv, **contexts)

    one = functools.partial(causal_on_one, split_size=64)
    return _same(one, through, _whole(96), **cut)


@on_first
def compiled(cut: dict[str, Any]) -> list[bool]:
    """Compares a compiled function, with no break in its graph, with one device."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return distributed.flash_attn_func(q, k, v, causal=True, **cut)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager")
    return _same(causal_on_one, function, _whole(32), **cut)


@on_first
def with_more_of_a_call(cut: dict[str, Any]) -> list[bool]:
    """Compares calls with attention sinks and with two head dims with one device."""
    *qkv, dout = _whole(72)
    sink, found = normal(4, seed=9).float(), []
    narrow = [*qkv[:2], normal(1, 72, 2, 8, seed=10), dout[..., :8]]
    both = math.gcd(2, dist.get_world_size(cut["group"]))
    for degree, order, given, inputs in (
        (both, "zigzag", sink, [*qkv, dout]),
        (None, "contiguous", sink.bfloat16(), [*qkv, dout]),
        (None, "zigzag", None, narrow),
        (1, "contiguous", None, narrow),
    ):
        one = functools.partial(causal_on_one, learnable_sink=given)
        cut["order"] = order
        chosen = {"learnable_sink": given, "ulysses_degree": degree, "heads_k_stride": 1}
        over = functools.partial(distributed.flash_attn_func, causal=True, **chosen, **cut)
        with patch.multiple(tree, CHUNK_ROWS=16):
            found += _same(one, over, inputs, **cut)
    return found


def with_dtensors(packed: bool) -> list[bool]:
    """Compares DTensors on 2 x 2 ranks, tokens over one dimension, heads over the other."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("tp", "cp"))
    tokens = 0 if packed else 1
    placed = [Shard(tokens + 1), Shard(tokens)]
    options: dict[str, Any] = {"causal": True}
    name = "flash_attn_func"
    if packed:
        starts, name = int32(0, 13, 40), "flash_attn_varlen_func"
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": 27, "max_seqlen_k": 27}
    inputs = _whole(40, packed=packed)
    expected = _gradients(functools.partial(getattr(package, name), **options), inputs)
    parts: Any = [distribute_tensor(one, mesh, placed) for one in inputs]
    found = _gradients(functools.partial(getattr(distributed, name), **options), parts)
    assert all(isinstance(one, DTensor) and one.shape[-1] == 16 for one in found)
    assert found[0].shape == expected[0].shape
    return [
        bits_equal(
            distribute_tensor(one.detach(), mesh, placed).to_local(), cast(Any, other).to_local()
        )
        for one, other in zip(expected, found, strict=True)
    ]


def packed_in_one() -> list[bool]:
    """Compares the functions that take q, k and v in fewer tensors."""
    qkv = normal(1, 8, 3, 2, 16, seed=1)
    (q, k, v), kv = qkv.unbind(2), qkv[:, :, 1:]
    starts = int32(0, 10, 32)
    lengths = (starts, starts, 22, 22)
    dense = distributed.flash_attn_func(q, k, v, causal=True)
    varlen = distributed.flash_attn_varlen_func(q[0], k[0], v[0], *lengths, causal=True)
    found = (
        (distributed.flash_attn_qkvpacked_func(qkv, causal=True), dense),
        (distributed.flash_attn_kvpacked_func(q, kv, causal=True), dense),
        (distributed.flash_attn_varlen_qkvpacked_func(qkv[0], starts, 22, causal=True), varlen),
        (distributed.flash_attn_varlen_kvpacked_func(q[0], kv[0], *lengths, causal=True), varlen),
    )
    return [bits_equal(*pair) for pair in found]


def in_context_parallel() -> list[bool]:
    """Compares our functions on tensors cut by torch's context_parallel with one device."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    ranks = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("cp",))
    cut: dict[str, Any] = {"mesh": mesh, "order": "zigzag"}
    inputs = _whole(16 * ranks)
    expected = causal_on_one(*inputs[:3])
    buffers = [tensor.clone() for tensor in inputs]

    def sdpa(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) for one in qkv)
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4):
        assert buffers[0].shape[1] == 16
        out = distributed.flash_attn_func(*buffers[:3], causal=True, **cut)
        (whole,) = context_parallel_unshard(mesh, [out], [1])
        with distributed.SdpaOverRanks(mesh=mesh):
            found = _same(causal_on_one, sdpa, inputs, **cut)
    ours = distributed.unshard(out, 1, **cut)
    return [bits_equal(whole, expected), bits_equal(ours, expected), *found]


def _packed(starts: torch.Tensor, causal: bool = True, **options: Any) -> tuple[Any, Tensors]:
    """Returns a function on one device and the inputs of packed sequences."""
    longest, total = int(starts.diff().max()), int(starts[-1])

    def one(*qkv: torch.Tensor) -> Any:
        lengths = starts, starts, longest, longest
        return package.flash_attn_varlen_func(*qkv, *lengths, causal=causal, **options)

    return one, _whole(total, packed=True)


@on_first
def as_llama3(cut: dict[str, Any], causal: bool, copied: bool) -> list[bool]:
    """Compares the functions of ring-flash-attn with one device."""
    starts = int32(0, 7, 43, 44, 48)
    ranks = dist.get_world_size(cut["group"])
    prepared = ring.llama3_flash_attn_prepare_cu_seqlens(starts, causal, dist.get_rank(), ranks)
    *own, place = prepared
    if copied:
        own = [one.clone() if isinstance(one, torch.Tensor) else one for one in own]
    options = {"heads_k_stride": 2, "local_k_slice": place, "causal": causal, **cut}

    def over(*qkv: torch.Tensor) -> Any:
        return ring.llama3_flash_attn_varlen_func(*qkv, *own, **options)

    one, inputs = _packed(starts, causal)
    return _same(one, over, inputs, 0, **cut)


# One tensor in groups of several sizes.
_OWN_STARTS = int32(0, 4, 16, 18)


@on_first
def as_zigzag_ring(cut: dict[str, Any], packed: bool) -> list[bool]:
    """Compares the other functions of ring-flash-attn with one device."""
    cut["order"], group = "zigzag", {"group": cut["group"]}
    if not packed:
        over = functools.partial(ring.zigzag_ring_flash_attn_func, causal=True, **group)
        return _same(causal_on_one, over, _whole(36, 2), **cut)
    cut["cu_seqlens"] = _OWN_STARTS * dist.get_world_size(cut["group"])

    def varlen(*qkv: torch.Tensor) -> Any:
        function = ring.zigzag_ring_flash_attn_varlen_func
        return function(*qkv, _OWN_STARTS, 12, causal=True, **group)

    one, inputs = _packed(cut["cu_seqlens"])
    return _same(one, varlen, inputs, 0, **cut)


def _varlen_over(starts: torch.Tensor, **options: Any) -> Any:
    lengths = starts, starts, 0, 0
    return lambda *qkv: distributed.flash_attn_varlen_func(*qkv, *lengths, causal=True, **options)


@on_first
def with_sinks_packed(cut: dict[str, Any]) -> list[bool]:
    """Compares packed sequences with attention sinks, some of them on one rank, with one device."""
    starts = int32(0, 3, 9, 54, 72)
    sink = normal(4, seed=9).float()
    one, inputs = _packed(starts, learnable_sink=sink)
    return _same(one, _varlen_over(starts, learnable_sink=sink, **cut), inputs, 0, **cut)


@on_first
def with_uneven_lengths(cut: dict[str, Any]) -> list[bool]:
    """Compares sequences whose tokens don't divide by the ranks with one device."""
    same = []
    for order, lengths in itertools.product(
        ("contiguous", "zigzag"), ((9, 14), (1, 0, 30, 2), (61,))
    ):
        starts = int32(0, *itertools.accumulate(lengths))
        cut["order"] = order
        one, inputs = _packed(starts)
        over = _varlen_over(starts, **cut)
        whole_cut = {**cut, "cu_seqlens": starts}
        with patch.multiple(tree, CHUNK_ROWS=4096 if len(lengths) > 1 else 16):
            same += _same(one, over, inputs, 0, **whole_cut)
        out = over(*(distributed.shard(tensor, 0, **whole_cut) for tensor in inputs[:3]))
        whole = distributed.unshard(out, 0, **whole_cut)
        same.append(bits_equal(one(*inputs[:3]), whole[: starts[-1]]))
    return same


def raised(name: str, *calls: dict[str, Any]) -> str:
    """Returns what a function raises with the arguments of each rank, or with those of all."""
    function: Any = functools.reduce(getattr, name.split("."), distributed)
    return _message(functools.partial(function, **calls[dist.get_rank() % len(calls)]))


def on_a_reversed_mesh() -> str:
    """Returns what a call raises on a mesh whose order is not that of its group."""
    from torch.distributed.device_mesh import DeviceMesh

    q = normal(1, 8, 2, 16, seed=1)
    mesh = DeviceMesh("cpu", [1, 0])
    return _message(lambda: distributed.flash_attn_func(q, q, q, mesh=mesh))


def _message(function: Any) -> str:
    """Returns what a function raises."""
    try:
        function()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _inputs(shape: str, gradient: bool = True) -> torch.Tensor:
    """Returns q, k and v of a shape."""
    return normal(1, 16 if shape in "Aab" else 8, 2, 16, seed=1).requires_grad_(gradient)


def steps_raised(steps: tuple[str, str], when: str) -> tuple[str, str]:
    """Returns what the first wrong step raises, and what a good call does then."""
    group = dist.new_group()
    outs: list[Any] = []

    def call(step: str) -> None:
        if step.isupper():
            q = _inputs(step)
            outs.append(distributed.flash_attn_func(q, q, q, causal=True, group=group))
        else:
            outs["ab".index(step)].sum().backward()

    with patch.dict(os.environ, {VARIABLE: when}):
        if when:  # each shape has been checked before
            for _ in range(2):
                for shape in "AB":
                    call(shape)
                    outs.pop().sum().backward()
        messages = [_message(functools.partial(call, step)) for step in steps[dist.get_rank()]]
        q = _inputs("A", False)
        good = _message(lambda: distributed.flash_attn_func(q, q, q, group=group))
    first = next((message for message in messages if message), "")
    return first, good


def told_in_steps() -> dict[str, int]:
    """Returns how often a rank tells of a call, in steps of two layers, forward and backward."""
    group, told = dist.new_group(), []
    whole = agreement.Agreement._tell

    def counting(self: Any, number: int, what: Any) -> None:
        told.append(number)
        whole(self, number, what)

    def layer(q: torch.Tensor, softcap: float) -> Any:
        return distributed.flash_attn_func(q, q, q, softcap=softcap, group=group)

    def step(softcap: float = 0.0) -> None:
        layer(layer(_inputs("A"), softcap), softcap).sum().backward()

    def checkpointed_step() -> None:
        q: Any = _inputs("B")
        for _ in range(2):
            q = torch.utils.checkpoint.checkpoint(layer, q, 0.0, use_reentrant=False)
        q.sum().backward()

    def packed_step(*lengths: int) -> None:
        starts = int32(0, *itertools.accumulate(lengths))
        q: Any = normal(int(starts[-1]) // 2, 2, 16, seed=1).requires_grad_()
        packed = starts, starts, 0, 0
        for _ in range(2):
            q = distributed.flash_attn_varlen_func(q, q, q, *packed, group=group)
        q.sum().backward()

    found = {}
    steps: dict[str, Any] = dict.fromkeys(("first", "second", "failed", "after"), step)
    steps |= {"off": step, "always": step}
    for name, lengths in (("packed", (4, 8)), ("packed again", (4, 8)), ("packed anew", (9, 7))):
        steps[name] = functools.partial(packed_step, *lengths)
    steps |= dict.fromkeys(("checkpointed", "checkpointed again"), checkpointed_step)
    steps["checkpointed, third"] = checkpointed_step
    with patch.multiple(agreement.Agreement, _tell=counting):
        for name, function in steps.items():
            told.clear()
            with patch.dict(os.environ, {VARIABLE: name if name in ("off", "always") else ""}):
                if name == "failed":
                    function = functools.partial(step, 0.25 if dist.get_rank() == 1 else 0.5)
                _message(function)
            found[name] = len(told)
    return found


def mixed_dtensors() -> str:
    """Returns what a call raises if q alone is no DTensor on the second rank."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", [0, 1])
    q = _inputs("A")
    k = DTensor.from_local(q, mesh, [Shard(1)])
    return _message(lambda: distributed.flash_attn_func(q if dist.get_rank() == 1 else k, k, k))


def broken_backward(settled: bool, begun: bool, by: type[BaseException]) -> tuple[str, str]:
    """Returns what a backward raises that breaks on the second rank, and the next call.

    Args:
        settled: whether a step of this shape was made before.
        begun: whether messages have been sent when it breaks.
        by: what is raised there.
    """
    q = _inputs("A")

    def step() -> None:
        out = distributed.flash_attn_func(q, q, q, causal=True)
        out.sum().backward()

    def breaks(*arguments: Any, **others: Any) -> Any:
        raise by("broken")

    if settled:
        step()
    out = distributed.flash_attn_func(q, q, q, causal=True)
    module, name = (passes, "_Steps") if begun else (ops, "check_kernels")
    broken = breaks if dist.get_rank() == 1 else getattr(module, name)
    with patch.object(module, name, broken):
        first = _message(lambda: out.sum().backward())
    return first, _message(lambda: distributed.flash_attn_func(q, q, q, causal=True))


def other_wheel(name: str) -> str:
    """Returns what a call raises if something of the second rank's installation differs."""
    whole = ops._installed

    def installed(device: torch.device) -> dict[str, Any]:
        return {**whole(device), name: dist.get_rank() + 1}

    ops._known.cache_clear()
    try:
        with patch.multiple(ops, _installed=installed):
            return _message(lambda: distributed.flash_attn_func(*[_inputs("A")] * 3))
    finally:
        ops._known.cache_clear()


def kept_by_cycles(degree: int) -> list[tuple[int, ...]]:
    """Returns the shapes of tensors that two steps leave to the garbage collector."""
    inputs = [tensor.requires_grad_() for tensor in _whole(64)[:3]]

    def step() -> None:
        out = distributed.flash_attn_func(*inputs, causal=True, ulysses_degree=degree)
        out.sum().backward()

    with patch.multiple(tree, CHUNK_ROWS=16):
        step()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        step()
        step()
        gc.collect()
        gc.set_debug(0)
        gc.enable()
    kept = [tuple(one.shape) for one in gc.garbage if isinstance(one, torch.Tensor)]
    gc.garbage.clear()
    return kept


@on_first
def explained(cut: dict[str, Any]) -> Any:
    """Returns what `explain` says of a dense and a packed call."""
    q = normal(1, 64, 4, 16, seed=1)
    starts = int32(0, *range(2, 129, 2))
    dense = distributed.explain(q, q, causal=True, ulysses_degree=2, **cut)
    return dense, distributed.explain(q[0], q[0], starts, starts, ulysses_degree=1, **cut)


@on_first
def messages_of(cut: dict[str, Any], degree: int) -> tuple[int, int]:
    """Returns how many messages a forward and a backward take in one step of heads."""
    found: list[str] = []
    whole = Ranks.all_to_all

    def counting(self: Ranks, *arguments: Any) -> Pending:
        found.append(arguments[-1])
        return whole(self, *arguments)

    inputs = [tensor.requires_grad_() for tensor in _whole(64)[:3]]
    divided = {"ulysses_degree": degree, "heads_k_stride": 2}
    with patch.multiple(tree, CHUNK_ROWS=16), patch.multiple(Ranks, all_to_all=counting):
        out = distributed.flash_attn_func(*inputs, causal=True, **divided, **cut)
        before = len(found)
        out.sum().backward()
    return before, len(found) - before


def misaligned(degree: int) -> list[str]:
    """Returns the ops that would copy tensors that have arrived, as rows aren't at 16 bytes."""
    module: Any = passes
    whole, found = module.run, []

    def run(call: Any) -> Any:
        for one in call[1]:
            if isinstance(one, torch.Tensor) and one.dim() == 3:
                rows = one.data_ptr(), *(size * one.itemsize for size in one.stride()[:2])
                found.extend([call[0]] * any(at % 16 for at in rows))
        return whole(call)

    inputs = [tensor.requires_grad_() for tensor in _whole(64)[:3]]
    with patch.multiple(passes, run=run):
        out = distributed.flash_attn_func(*inputs, causal=True, ulysses_degree=degree)
        out.sum().backward()
    return found


def benchmarked(seqlen: int) -> dict[str, Any]:
    """Returns the benchmark's result of a small case."""
    from tests.benchmarks.ranks import Case as Timed
    from tests.benchmarks.ranks import Shape

    return Timed(Shape(seqlen, 1, 4, 2, 8), "cpu", 1).measured()


def verified(scale: Any, out: str, broken: bool) -> int:
    """Runs all of `verify --ranks` with other cases; broken: sums are lost between ranks."""
    with (
        patch.multiple(run, scale_of=lambda device, quick: scale),
        patch.multiple(passes, _gradients=_no_sums if broken else _BACKWARD),
        patch.multiple(tree, CHUNK_ROWS=16),
    ):
        return run.run("cpu", True, Path(out))


def answer(pipe: Any, *answers: Any) -> None:
    """Sends answers through a pipe, then raises what comes; with none it hangs."""
    for one in answers:
        pipe.send(one)
    if not answers:
        time.sleep(99)
    raise ValueError(pipe.recv())
