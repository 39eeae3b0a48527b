"""One case, on the ranks of its groups."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist

from ... import distributed
from ...distributed import ops
from ...interface import flash_attn_func, flash_attn_varlen_func
from ..bits import difference
from .cases import Case

NAMES = ("out", "softmax_lse", "dq", "dk", "dv")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = dict[str, torch.Tensor]


@functools.cache
def groups_of(ranks: int, heads_ranks: int) -> dict[str, Any]:
    """Makes the groups of a case; all ranks of the world have to call this.

    Returns:
        Keyword arguments `group` and `heads_group` of a call; empty on ranks that have no part.
    """
    size, rank = ranks * heads_ranks, dist.get_rank()
    found: dict[str, Any] = {}
    # The ranks of a heads group follow one another.
    for name, members in (
        *(("group", [s * heads_ranks + h for s in range(ranks)]) for h in range(heads_ranks)),
        *(("heads_group", [s * heads_ranks + h for h in range(heads_ranks)]) for s in range(ranks)),
    ):
        group = dist.new_group(members)
        if rank in members and rank < size and not (name == "heads_group" and heads_ranks == 1):
            found[name] = group
    if heads_ranks > 1 and ranks == 1:
        found.pop("group", None)
    return found


@functools.cache
def together(size: int) -> Any:
    """Makes the group of the first ranks; all ranks of the world have to call this."""
    return dist.new_group(list(range(size)))


def try_case(case: Case, device: str) -> dict[str, str] | None:
    """Computes a case on one device and over ranks.

    Args:
        case: the case.
        device: "cpu" or "cuda".

    Returns:
        For each result that differs on this rank, where; None on ranks that have no part.
    """
    groups, everyone = groups_of(case.ranks, case.heads_ranks), together(case.size)
    if dist.get_rank() >= case.size:
        return None
    tensors = _draw(case, device)
    expected = _expected(case, tensors, everyone)
    starts: list[torch.Tensor] = []
    if case.packed:
        starts = [_starts(lengths, device) for lengths in (case.lengths_q, case.lengths_k)]
    cut: dict[str, Any] = {**groups, "order": case.order}

    def shard(name: str, whole: torch.Tensor) -> torch.Tensor:
        of_keys = name in ("k", "v", "dk", "dv")
        cu_seqlens = starts[of_keys] if starts else None
        dim = whole.dim() - 1 if name == "softmax_lse" else whole.dim() - 3
        return distributed.shard(whole, dim, cu_seqlens=cu_seqlens, **cut)

    leaves = [shard(name, tensors[name]).requires_grad_() for name in ("q", "k", "v")]
    q, k, v = leaves
    before, ops.GATHER = ops.GATHER, case.gather
    try:
        with torch.enable_grad():
            if not starts:
                out, softmax_lse, _ = distributed.flash_attn_func(
                    q, k, v, return_attn_probs=True, **case.options, **cut
                )
            else:
                out, softmax_lse, _ = distributed.flash_attn_varlen_func(
                    q,
                    k,
                    v,
                    starts[0],
                    starts[1],
                    max(case.lengths_q),
                    max(case.lengths_k),
                    return_attn_probs=True,
                    **case.options,
                    **cut,
                )
        gradients = torch.autograd.grad(out, leaves, shard("dout", tensors["dout"]))
    finally:
        ops.GATHER = before
    differing = {}
    for name, found in zip(NAMES, (out, softmax_lse, *gradients), strict=True):
        unlike = difference(shard(name, expected[name]), found)
        if unlike is not None:
            differing[name] = unlike.words
    return differing


def _draw(case: Case, device: str) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)
    tensors = {}
    for name, lengths, heads in (
        ("q", case.lengths_q, case.nheads),
        ("k", case.lengths_k, case.nheads_k),
        ("v", case.lengths_k, case.nheads_k),
        ("dout", case.lengths_q, case.nheads),
    ):
        tokens = (sum(lengths),) if case.packed else (len(lengths), lengths[0])
        drawn = torch.randn((*tokens, heads, case.head_dim), generator=generator)
        tensors[name] = drawn.to(device, _DTYPES[case.dtype])
    return tensors


def _starts(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32).to(device)


def _expected(case: Case, tensors: Tensors, everyone: Any) -> Tensors:
    """Returns what one device gives: computed by the first rank, for all."""
    q, k = tensors["q"], tensors["k"]
    lse_shape = (q.shape[-2], q.shape[0]) if case.packed else (q.shape[0], q.shape[2], q.shape[1])
    expected = {
        "out": torch.empty_like(q),
        "softmax_lse": q.new_empty(lse_shape, dtype=torch.float32),
        "dq": torch.empty_like(q),
        "dk": torch.empty_like(k),
        "dv": torch.empty_like(k),
    }
    if dist.get_rank() == 0:
        leaves = q, k, v = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
        with torch.enable_grad():
            if case.packed:
                out, softmax_lse, _ = flash_attn_varlen_func(
                    q,
                    k,
                    v,
                    _starts(case.lengths_q, str(q.device)),
                    _starts(case.lengths_k, str(q.device)),
                    max(case.lengths_q),
                    max(case.lengths_k),
                    return_attn_probs=True,
                    **case.options,
                )
            else:
                out, softmax_lse, _ = flash_attn_func(
                    q, k, v, return_attn_probs=True, **case.options
                )
        gradients = torch.autograd.grad(out, leaves, tensors["dout"])
        results = (out.detach(), softmax_lse, *gradients)
        expected = dict(zip(NAMES, (one.contiguous() for one in results), strict=True))
    for name in NAMES:
        dist.broadcast(expected[name], group=everyone, group_src=0)
    return expected
