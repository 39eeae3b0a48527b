"""Functions that tests run on every rank of a pool, by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import flash_attn_deterministic
import torch
import torch.distributed as dist
from bits import bits_equal
from flash_attn_deterministic import tree
from flash_attn_deterministic.distributed import (
    agreement,
    exchange,
    ops,
    passes,
    ring_flash_attn,
)
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
    with _instead(tree, CHUNK_ROWS=chunk):
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
    with _instead(module, **{name: broken}):
        return _outcome(case)


@contextlib.contextmanager
def _instead(module: Any, **stand_ins: Any) -> Iterator[None]:
    """Replaces functions of a module for a while."""
    before = {name: getattr(module, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for name, one in before.items():
            setattr(module, name, one)


def _no_sums(*arguments: Any, sums: bool = False) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = _BACKWARD(*arguments, sums=sums)
    return (dq, torch.zeros_like(dk), torch.zeros_like(dv)) if sums else (dq, dk, dv)


def _rounded_sums(*arguments: Any, sums: bool = False) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = _BACKWARD(*arguments, sums=sums)
    return dq, dk.bfloat16().to(dk.dtype), dv.bfloat16().to(dv.dtype)


_BACKWARD: Any = passes._gradients


def draw(shape: tuple[int, ...], number: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns the same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def group_of(ranks: int) -> dict[str, Any]:
    """Returns `group` for the first ranks, and nothing for the others."""
    group = trial.group_of(ranks)
    return {"group": group} if dist.get_rank() < ranks else {}


def _whole(batch: int, seqlen: int, nheads_k: int = 2) -> Tensors:
    return [
        draw((batch, seqlen, heads, 16), number)
        for number, heads in enumerate((4, nheads_k, nheads_k, 4))
    ]


def _gradients(function: Any, inputs: Tensors, dout: torch.Tensor, **options: Any) -> Tensors:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def checkpointed(ranks: int) -> list[bool] | None:
    """Compares a checkpointed call over ranks with one device."""
    group = group_of(ranks)
    if not group:
        return None
    *inputs, dout = _whole(1, 24 * ranks)
    expected = _gradients(package.flash_attn_func, inputs, dout, causal=True, split_size=64)

    def through(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda *qkv: distributed.flash_attn_func(*qkv, causal=True, order="zigzag", **group),
            *(q, k, v),
            use_reentrant=False,
            context_fn=package.checkpoint_contexts,
        )
        return result

    cut: dict[str, Any] = {**group, "order": "zigzag"}
    local = [distributed.shard(tensor, 1, **cut) for tensor in inputs]
    with package.deterministic_mode(split_size=64):
        leaves = [tensor.requires_grad_() for tensor in local]
        out = through(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, distributed.shard(dout, 1, **cut))]
    return _same(expected, found, cut)


def _same(expected: Tensors, found: Tensors, cut: dict[str, Any]) -> list[bool]:
    return [
        bits_equal(distributed.shard(one, 1, **cut), other)
        for one, other in zip(expected, found, strict=True)
    ]


def compiled(ranks: int) -> list[bool] | None:
    """Compares a compiled function over ranks, with no break in its graph, with one device."""
    group = group_of(ranks)
    if not group:
        return None
    *inputs, dout = _whole(1, 16 * ranks)
    expected = _gradients(package.flash_attn_func, inputs, dout, causal=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = distributed.flash_attn_func(q, k, v, causal=True, **group)
        return out

    local = [distributed.shard(tensor, 1, **group) for tensor in inputs]
    function = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = _gradients(function, local, distributed.shard(dout, 1, **group))
    return _same(expected, found, group)


def with_dtensors(ranks: int) -> list[bool] | None:
    """Compares DTensors, tokens over ranks, with one device."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", list(range(ranks)))
    if dist.get_rank() >= ranks:
        return None
    *inputs, dout = _whole(2, 12 * ranks)
    expected = _gradients(package.flash_attn_func, inputs, dout)
    cut = {"mesh": mesh}
    leaves: list[Any] = [
        DTensor.from_local(distributed.shard(tensor, 1, **cut), mesh, [Shard(1)]).requires_grad_()
        for tensor in inputs
    ]
    out = distributed.flash_attn_func(*leaves)
    assert isinstance(out, DTensor)
    assert out.shape == inputs[0].shape
    placed = DTensor.from_local(distributed.shard(dout, 1, **cut), mesh, [Shard(1)])
    gradients = torch.autograd.grad(out, leaves, placed)
    return _same(expected, [cast(Any, one).to_local() for one in (out, *gradients)], cut)


def with_more_of_a_call(ranks: int) -> list[bool] | None:
    """Compares calls with attention sinks and with two head dims with one device."""
    group = group_of(ranks)
    if not group:
        return None
    sinks, found = draw((4,), 9).float(), []
    small = draw((1, 24 * ranks, 2, 8), 10)
    for degree, order, sink, v in (
        (1, "zigzag", sinks, None),
        (None, "contiguous", sinks.bfloat16(), None),
        (2 if ranks % 2 == 0 else 1, "zigzag", sinks, None),
        (None, "zigzag", None, small),
        (1, "contiguous", None, small),
    ):
        *inputs, dout = _whole(1, 24 * ranks)
        if v is not None:
            inputs, dout = [*inputs[:2], v], dout[..., :8]
        options: dict[str, Any] = {"causal": True, "learnable_sink": sink}
        cut: dict[str, Any] = {**group, "order": order}
        parts = [distributed.shard(tensor, 1, **cut) for tensor in (*inputs, dout)]
        with _instead(tree, CHUNK_ROWS=16):
            expected = _gradients(package.flash_attn_func, inputs, dout, **options)
            options |= {**cut, "ulysses_degree": degree, "heads_k_stride": 1}
            over = _gradients(distributed.flash_attn_func, parts[:3], parts[3], **options)
        found += _same(expected, over, cut)
    return found


def with_dtensors_of_two_dimensions(packed: bool) -> list[bool]:
    """Compares DTensors on 2 x 2 ranks, tokens over one dimension, heads over the other."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("tp", "cp"))
    tokens = 0 if packed else 1
    inputs = _whole(1, 40)
    placed = [Shard(tokens + 1), Shard(tokens)]
    options: dict[str, Any] = {"causal": True}
    function, over = package.flash_attn_func, distributed.flash_attn_func
    if packed:
        starts = torch.tensor([0, 13, 40], dtype=torch.int32)
        inputs = [tensor[0] for tensor in inputs]
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": 27, "max_seqlen_k": 27}
        function, over = package.flash_attn_varlen_func, distributed.flash_attn_varlen_func
    expected = _gradients(function, inputs[:3], inputs[3], **options)
    leaves: list[Any] = [
        distribute_tensor(one, mesh, placed).detach().requires_grad_() for one in inputs[:3]
    ]
    out = over(*leaves, **options)
    assert isinstance(out, DTensor)
    found = [out, *torch.autograd.grad(out, leaves, distribute_tensor(inputs[3], mesh, placed))]
    return [
        bits_equal(
            distribute_tensor(one.detach(), mesh, placed).to_local(), cast(Any, other).to_local()
        )
        for one, other in zip(expected, found, strict=True)
    ]


def twice_differentiated() -> str:
    """Returns what a double backward raises."""
    q = draw((1, 4, 2, 16), 1).requires_grad_()
    out = distributed.flash_attn_func(q, q, q)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return _message(lambda: torch.autograd.grad(gradient.sum(), q))


def packed_in_one(number: int) -> list[bool]:
    """Compares the functions that take q, k and v in fewer tensors."""
    qkv = draw((1, 8, 3, 2, 16), number)
    q, k, v = qkv.unbind(2)
    starts = torch.tensor([0, 10, 32], dtype=torch.int32)
    packed = (starts, starts, 22, 22)
    dense, varlen = (
        distributed.flash_attn_func(q, k, v, causal=True),
        distributed.flash_attn_varlen_func(q[0], k[0], v[0], *packed, causal=True),
    )
    kv = qkv[:, :, 1:]
    return [
        bits_equal(distributed.flash_attn_qkvpacked_func(qkv, causal=True), dense),
        bits_equal(distributed.flash_attn_kvpacked_func(q, kv, causal=True), dense),
        bits_equal(
            distributed.flash_attn_varlen_qkvpacked_func(qkv[0], starts, 22, causal=True), varlen
        ),
        bits_equal(
            distributed.flash_attn_varlen_kvpacked_func(q[0], kv[0], *packed, causal=True), varlen
        ),
    ]


def in_context_parallel(ranks: int) -> list[bool] | None:
    """Compares our function on tensors cut by torch's context_parallel with one device."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("cp",))
    if dist.get_rank() >= ranks:
        return None
    *inputs, dout = _whole(1, 16 * ranks)
    expected, *gradients = _gradients(package.flash_attn_func, inputs, dout, causal=True)
    buffers = [tensor.clone() for tensor in (*inputs, dout)]

    def sdpa(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) for one in qkv)
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4):
        assert buffers[0].shape[1] == 16
        out = distributed.flash_attn_func(*buffers[:3], causal=True, mesh=mesh, order="zigzag")
        (whole,) = context_parallel_unshard(mesh, [out], [1])
        with distributed.SdpaOverRanks(mesh=mesh):
            found = _gradients(sdpa, buffers[:3], buffers[3])
    cut = {"mesh": mesh, "order": "zigzag"}
    ours = distributed.unshard(out, 1, **cut)
    same = [bits_equal(whole, expected), bits_equal(ours, expected)]
    return same + _same([expected, *gradients], found, cut)


def as_llama3(ranks: int, causal: bool, copied: bool) -> list[bool] | None:
    """Compares the functions of ring-flash-attn with one device."""
    group = group_of(ranks)
    if not group:
        return None
    lengths = (7, 12 * ranks, 1, 4 * ranks - 8)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    inputs, expected = _packed_on_one(starts, causal)
    prepared = ring.llama3_flash_attn_prepare_cu_seqlens(starts, causal, dist.get_rank(), ranks)
    *own, place = prepared
    if copied:
        own = [one.clone() if isinstance(one, torch.Tensor) else one for one in own]
    found = _gradients(
        lambda *qkv: ring.llama3_flash_attn_varlen_func(
            *qkv, *own, heads_k_stride=2, local_k_slice=place, causal=causal, **group
        ),
        [distributed.shard(tensor, 0, **group) for tensor in inputs[:3]],
        distributed.shard(inputs[3], 0, **group),
    )
    return [
        bits_equal(distributed.shard(one, 0, **group), other)
        for one, other in zip(expected, found, strict=True)
    ]


def _packed_on_one(starts: torch.Tensor, causal: bool) -> tuple[Tensors, Tensors]:
    inputs = [tensor[0] for tensor in _whole(1, int(starts[-1]))]
    longest = int(starts.diff().max())
    expected = _gradients(
        lambda *qkv: package.flash_attn_varlen_func(
            *qkv, starts, starts, longest, longest, causal=causal
        ),
        inputs[:3],
        inputs[3],
    )
    return inputs, expected


def with_sinks_packed(ranks: int) -> list[bool] | None:
    """Compares packed sequences with attention sinks, some of them on one rank, with one device."""
    group = group_of(ranks)
    if not group:
        return None
    starts = torch.tensor([0, 3, 9, 9 + 15 * ranks, 24 * ranks], dtype=torch.int32)
    inputs = [tensor[0] for tensor in _whole(1, 24 * ranks)]
    options: dict[str, Any] = {"causal": True, "learnable_sink": draw((4,), 9).float()}
    lengths = starts, starts, 24 * ranks, 24 * ranks
    out, lse, _ = package.flash_attn_varlen_func(
        *inputs[:3], *lengths, return_attn_probs=True, **options
    )
    parts = [distributed.shard(tensor, 0, **group) for tensor in inputs[:3]]
    found = distributed.flash_attn_varlen_func(
        *parts, *lengths, return_attn_probs=True, **options, **group
    )
    return [
        bits_equal(distributed.shard(out, 0, **group), found[0]),
        bits_equal(distributed.shard(lse, 1, **group), found[1]),
    ]


def sdpa_raised(what: dict[str, Any]) -> str:
    """Returns what a call of torch's function raises over ranks."""
    q, k = (draw((1, heads, 8, 16), heads) for heads in (4, what.pop("heads", 4)))
    with distributed.SdpaOverRanks():
        function: Any = torch.nn.functional.scaled_dot_product_attention
        return _message(lambda: function(q, k, k, **what))


def sink_raised(what: str) -> str:
    """Returns what a call raises whose sink needs a gradient, or is on one rank only."""
    q, k = draw((1, 16, 4, 16), 1), draw((1, 8 if what == "rows" else 16, 2, 16), 2)
    sink = draw((4,), 9).float().requires_grad_(what == "gradient")
    given = None if what == "one rank" and dist.get_rank() == 1 else sink
    return _message(lambda: distributed.flash_attn_func(q, k, k, causal=True, learnable_sink=given))


def with_uneven_lengths(ranks: int) -> list[bool] | None:
    """Compares sequences whose tokens don't divide by the ranks with one device."""
    group = group_of(ranks)
    if not group:
        return None
    same = []
    for order, lengths in itertools.product(
        ("contiguous", "zigzag"), ((9, 7 * ranks), (1, 0, 30, 2), (61,))
    ):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        inputs, expected = _packed_on_one(starts, True)
        cut: dict[str, Any] = {**group, "order": order}
        parts = [distributed.shard(tensor, 0, cu_seqlens=starts, **cut) for tensor in inputs]
        with _instead(tree, CHUNK_ROWS=4096 if len(lengths) > 1 else 16):
            if len(lengths) == 1:
                expected = _packed_on_one(starts, True)[1]
            function = functools.partial(_varlen_causal, starts, cut)
            found = _gradients(function, parts[:3], parts[3])
        whole = [distributed.unshard(one, 0, cu_seqlens=starts, **cut) for one in found]
        pairs = zip(expected, whole, strict=True)
        same += [bits_equal(one, other[: starts[-1]]) for one, other in pairs]
    return same


def _varlen_causal(starts: torch.Tensor, cut: dict[str, Any], *qkv: torch.Tensor) -> Any:
    return distributed.flash_attn_varlen_func(*qkv, starts, starts, 0, 0, causal=True, **cut)


# One tensor in groups of several sizes.
_OWN_STARTS = torch.tensor([0, 4, 16, 18], dtype=torch.int32)


def as_zigzag_ring(ranks: int, packed: bool) -> list[bool] | None:
    """Compares the other functions of ring-flash-attn with one device."""
    group = group_of(ranks)
    if not group:
        return None
    cut: dict[str, Any] = {**group, "order": "zigzag"}
    if packed:
        starts = _OWN_STARTS * ranks
        inputs, expected = _packed_on_one(starts, True)
        cut["cu_seqlens"] = starts

        def function(*qkv: torch.Tensor) -> Any:
            return ring.zigzag_ring_flash_attn_varlen_func(
                *qkv, _OWN_STARTS, 12, causal=True, **group
            )

    else:
        inputs = _whole(2, 12 * ranks)
        expected = _gradients(package.flash_attn_func, inputs[:3], inputs[3], causal=True)

        def function(*qkv: torch.Tensor) -> Any:
            return ring.zigzag_ring_flash_attn_func(*qkv, causal=True, **group)

    dim = 0 if packed else 1
    local = [distributed.shard(tensor, dim, **cut) for tensor in inputs]
    found = _gradients(function, local[:3], local[3])
    return [
        bits_equal(distributed.shard(one, dim, **cut), other)
        for one, other in zip(expected, found, strict=True)
    ]


def raised(change: dict[int, dict[str, Any]], ranks: int = 2, **options: Any) -> str | None:
    """Returns what a call raises on each rank if some ranks pass different arguments."""
    group = group_of(ranks)
    if not group:
        return None
    given: dict[str, Any] = {"seqlen": 8, "nheads_k": 2, "dtype": torch.bfloat16, **options}
    given.update(change.get(dist.get_rank(), {}))
    seqlen, nheads_k, dtype = (given.pop(name) for name in ("seqlen", "nheads_k", "dtype"))
    q, k = (draw((1, seqlen, heads, 16), 1).to(dtype) for heads in (4, nheads_k))
    q.requires_grad_(given.pop("requires_grad", False))
    mode = package.deterministic_mode(keep_residual=given.pop("keep_residual", None))
    with mode:
        return _message(lambda: distributed.flash_attn_func(q, k, k, **{**group, **given}))


def unshard_raised(change: dict[int, dict[str, Any]]) -> str:
    """Returns what `unshard` raises if ranks pass different arguments or parts."""
    part = torch.zeros(4 if change else 3 + dist.get_rank())
    return _message(lambda: distributed.unshard(part, 0, **change.get(dist.get_rank(), {})))


def wrong_on_one(wrong: dict[str, Any]) -> str:
    """Returns what a call raises on two ranks, where the second passes a wrong type."""
    q = draw((8, 4, 16), 1)
    here = wrong if dist.get_rank() == 1 else {}
    starts = torch.tensor([0, 16], dtype=torch.int32)
    *own, place = ring.llama3_flash_attn_prepare_cu_seqlens(starts, True, dist.get_rank(), 2)
    lengths = (own[0], here.get("starts", own[1]), *own[2:], 1, here.get("place", place))

    def call() -> None:
        if "q" in wrong:
            distributed.flash_attn_func(here.get("q", q[None]), q[None], q[None])
        elif "parts" in wrong:
            parts = torch.stack([q[None]] * here.get("parts", 3), 2)
            distributed.flash_attn_qkvpacked_func(parts)
        else:
            ring.llama3_flash_attn_varlen_func(q, q, q, *lengths, causal=here.get("causal", True))

    return _message(call)


def on_a_reversed_mesh() -> str:
    """Returns what a call raises on a mesh whose order is not that of its group."""
    from torch.distributed.device_mesh import DeviceMesh

    q = draw((1, 8, 2, 16), 1)
    mesh = DeviceMesh("cpu", [1, 0])
    return _message(lambda: distributed.flash_attn_func(q, q, q, mesh=mesh))


def packed_raised(starts: dict[int, list[int]], order: str, total: int = 8) -> str | None:
    """Returns what a packed call raises on each rank."""
    group = group_of(2)
    if not group:
        return None
    q = draw((total, 2, 16), 1)
    cu_seqlens = torch.tensor(starts[dist.get_rank()], dtype=torch.int32)
    given = q, q, q, cu_seqlens, cu_seqlens, total, total
    return _message(lambda: distributed.flash_attn_varlen_func(*given, order=order, **group))


def _message(function: Any) -> str:
    """Returns what a function raises."""
    try:
        function()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _inputs(shape: str, gradient: bool = True) -> torch.Tensor:
    """Returns q, k and v of a shape."""
    return draw((1, 16 if shape in "Aab" else 8, 2, 16), 1).requires_grad_(gradient)


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

    with _variable(when):
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


@contextlib.contextmanager
def _variable(value: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def variable_raised(value: str) -> str:
    """Returns what a call raises with a value of the variable."""
    q = _inputs("A")
    with _variable(value):
        return _message(lambda: distributed.flash_attn_func(q, q, q))


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
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        q: Any = draw((int(starts[-1]) // 2, 2, 16), 1).requires_grad_()
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
    with _instead(agreement.Agreement, _tell=counting):
        for name, function in steps.items():
            told.clear()
            with _variable(name if name in ("off", "always") else ""):
                if name == "failed":
                    function = functools.partial(step, 0.25 if dist.get_rank() == 1 else 0.5)
                _message(function)
            found[name] = len(told)
    return found


def one_wrong_call(wrong: dict[str, Any]) -> tuple[str, str]:
    """Returns what a call raises, wrong on the second rank, and what a good one does then."""
    q = _inputs("A")
    given = wrong if dist.get_rank() == 1 else {}
    return (
        _message(lambda: distributed.flash_attn_func(q, q, q, **given)),
        _message(lambda: distributed.flash_attn_func(q, q, q)),
    )


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
    broken: dict[str, Any] = {}
    if dist.get_rank() == 1:
        broken = {"_Steps": breaks} if begun else {"check_kernels": breaks}
    with _instead(passes if begun else ops, **broken):
        first = _message(lambda: out.sum().backward())
    return first, _message(lambda: distributed.flash_attn_func(q, q, q, causal=True))


def other_wheel(name: str) -> str:
    """Returns what a call raises if something of the second rank's installation differs."""
    whole = ops._installed

    def installed(device: torch.device) -> dict[str, Any]:
        return {**whole(device), name: dist.get_rank() + 1}

    ops._known.cache_clear()
    try:
        with _instead(ops, _installed=installed):
            return _message(lambda: distributed.flash_attn_func(*[_inputs("A")] * 3))
    finally:
        ops._known.cache_clear()


def has_started() -> bool:
    """What is timed after it does not hold the start of processes and their imports."""
    return dist.is_initialized()


def end_on(rank: int, at: str) -> str:
    """Ends one rank in the middle of a call, and returns what the others raise."""
    q = draw((1, 16, 2, 16), 1).requires_grad_()
    if at == "later":
        distributed.flash_attn_func(q, q, q, causal=True).sum().backward()
    out = distributed.flash_attn_func(q, q, q, causal=True)
    if dist.get_rank() == rank:
        if at == "late":
            return ""  # makes no backward
        os._exit(1)
    return _message(lambda: out.sum().backward())


def kept_by_cycles(degree: int) -> list[tuple[int, ...]]:
    """Returns the shapes of tensors that two steps leave to the garbage collector."""
    inputs = [tensor.requires_grad_() for tensor in _whole(1, 64)[:3]]

    def step() -> None:
        out = distributed.flash_attn_func(*inputs, causal=True, ulysses_degree=degree)
        out.sum().backward()

    with _instead(tree, CHUNK_ROWS=16):
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


def explained() -> dict[str, Any]:
    """Returns what `explain` says of a dense and a packed call."""
    q = draw((1, 64, 4, 16), 1)
    starts = torch.tensor([0, *range(2, 129, 2)], dtype=torch.int32)
    dense = distributed.explain(q, q, causal=True, ulysses_degree=2)
    packed = distributed.explain(q[0], q[0], starts, starts, causal=True, ulysses_degree=1)
    return {"dense": dense, "packed": packed}


def tokens_received(ranks: int, window: tuple[int, int]) -> int | None:
    """Returns how many tokens of keys a rank gets from others in a forward."""
    group = group_of(ranks)
    if not group:
        return None
    got: list[int] = []

    class Counting(exchange.Arriving):
        def __init__(self, ranks_: Any, route: Any, *others: Any) -> None:
            got.append(route.received.others)
            super().__init__(ranks_, route, *others)

    with _instead(passes, Arriving=Counting):
        q = draw((1, 64, 1, 16), 1)
        distributed.flash_attn_func(q, q, q, window_size=window, **group)
    return sum(got)


def messages_of(degree: int) -> tuple[int, int] | None:
    """Returns how many messages a forward and a backward on two ranks take in one step of heads."""
    group = group_of(2)
    if not group:
        return None
    found: list[str] = []
    whole = Ranks.all_to_all

    def counting(self: Ranks, *arguments: Any) -> Pending:
        found.append(arguments[-1])
        return whole(self, *arguments)

    inputs = [tensor.requires_grad_() for tensor in _whole(1, 64)[:3]]
    divided = {"ulysses_degree": degree, "heads_k_stride": 2}
    with _instead(tree, CHUNK_ROWS=16), _instead(Ranks, all_to_all=counting):
        out = distributed.flash_attn_func(*inputs, causal=True, **divided, **group)
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

    inputs = [tensor.requires_grad_() for tensor in _whole(1, 64)[:3]]
    with _instead(passes, run=run):
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
        _instead(run, scale_of=lambda device, quick: scale),
        _instead(passes, _gradients=_no_sums if broken else _BACKWARD),
        _instead(tree, CHUNK_ROWS=16),
    ):
        return run.run("cpu", True, Path(out))


def answer(pipe: Any, *answers: Any) -> None:
    """Sends answers through a pipe, then raises what comes; with none it hangs."""
    for one in answers:
        pipe.send(one)
    if not answers:
        time.sleep(99)
    raise ValueError(pipe.recv())
