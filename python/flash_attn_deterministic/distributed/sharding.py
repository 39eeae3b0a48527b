"""Cuts tensors into the parts of ranks, and joins the parts."""

from __future__ import annotations

from typing import Any

import torch

from ..checks.describe import type_name
from ..checks.numbers import as_int
from ..checks.tensors import check_cu_seqlens
from ..errors import ArgumentError, ArgumentTypeError
from .messages import agreement
from .messages.groups import Groups, find_groups
from .planning.layout import CONTIGUOUS, Layout, check_order, dense_tokens, packed_tokens


def shard(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: Any = None,
    heads_group: Any = None,
    mesh: Any = None,
    order: str = CONTIGUOUS,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns this rank's part of a tensor that every rank has whole, without messages.

    Args:
        tensor: of any dtype, with the tokens of all ranks in one dimension.
        dim: that dimension.
        group: as in `flash_attn_func`; heads_group, mesh and order too.
        heads_group: see group.
        mesh: see group.
        order: see group.
        cu_seqlens: (batch + 1,), int32: where packed sequences begin and end; None: `dim` is one
            sequence.

    Returns:
        A copy of this rank's tokens. Gradients pass through.

    Raises:
        ArgumentError: the tokens don't divide by the ranks (by twice as many in the zigzag order),
            or there is no such dimension.
        ArgumentTypeError: a wrong type; DtypeError: cu_seqlens is not torch.int32.
    """
    groups = find_groups(group, heads_group, mesh)
    dim = _dimension(tensor, dim)
    index = _order(tensor.shape[dim], groups, order, cu_seqlens)
    size = groups.heads.size
    part = index[groups.sequence.rank].chunk(size)[groups.heads.rank]
    return tensor.index_select(dim, part.to(tensor.device))


def unshard(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: Any = None,
    heads_group: Any = None,
    mesh: Any = None,
    order: str = CONTIGUOUS,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the whole tensor of the parts that `shard` makes with the same arguments.

    Args:
        tensor: this rank's part.
        dim: as in `shard`; so are the arguments after it.

    Returns:
        The whole tensor, on every rank, without gradient.

    Raises:
        ArgumentError: as `shard`; the ranks' parts differ in shape or dtype, or their arguments.
        ArgumentTypeError: as `shard`.
        RankError: another rank has ended, or does not answer.
    """
    groups = find_groups(group, heads_group, mesh)
    dim, order = _dimension(tensor, dim), check_order(order)
    starts = None
    if cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", cu_seqlens, None, None)
        starts = tuple(cu_seqlens.tolist())
    part = tensor.detach()
    for ranks in (groups.heads, groups.sequence):
        if ranks.size > 1:  # gloo would abort the process if sizes differ
            facts: dict[str, Any] = {"tensor.dtype": part.dtype, "dim": dim, "order": order}
            facts["cu_seqlens"] = starts
            facts.update((f"tensor.shape[{at}]", size) for at, size in enumerate(part.shape))
            agreement.check(ranks, facts, part.device)
        parts = ranks.all_gather(part.contiguous(), "parts of a tensor")
        part = torch.cat(list(parts), dim)
    order_of_all = torch.cat(_order(part.shape[dim], groups, order, cu_seqlens))
    return part.index_select(dim, order_of_all.argsort().to(part.device))


def _dimension(tensor: Any, dim: Any) -> int:
    """Checks a tensor and its dimension of tokens, and returns the latter."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"tensor: expected a torch.Tensor, got {type_name(tensor)}")
    found = as_int("dim", dim)
    if not -tensor.dim() <= found < tensor.dim():
        raise ArgumentError(
            f"dim: expected a dimension of the tensor, of shape {tuple(tensor.shape)}, got {found}"
        )
    return found


def _order(
    tokens: int, groups: Groups, order: str, cu_seqlens: torch.Tensor | None
) -> list[torch.Tensor]:
    """Returns, for each rank of the sequence, the indices of its tokens."""
    order = check_order(order)
    ranks = groups.sequence.size
    every = ranks * groups.heads.size
    if tokens % every:
        raise ArgumentError(
            f"tensor: expected a number of tokens that divides by {every} ranks, got {tokens}"
        )
    if cu_seqlens is None:
        starts = (0, tokens)
        layout: Layout = dense_tokens(1, tokens // ranks, ranks, order).layout
    else:
        check_cu_seqlens("cu_seqlens", cu_seqlens, None, None)
        starts = tuple(cu_seqlens.tolist())
        layout = packed_tokens(starts, tokens // ranks, ranks, order, "cu_seqlens").layout
    found = []
    for number, own in enumerate(layout):
        index = torch.arange(number * (tokens // ranks), (number + 1) * (tokens // ranks))
        for piece in own:
            begin = starts[piece.sequence] + piece.begin
            index[piece.stored] = torch.arange(begin, begin + piece.end - piece.begin)
        found.append(index)
    return found
