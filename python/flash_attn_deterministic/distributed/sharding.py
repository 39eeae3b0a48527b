"""Cuts tensors into the parts of ranks, and joins the parts."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..checks.describe import type_name
from ..checks.numbers import as_int
from ..checks.tensors import check_cu_seqlens
from ..errors import ArgumentError, ArgumentTypeError
from .calls import reported
from .layout import CONTIGUOUS, ZIGZAG, check_order, layout_of, tokens_of, zigzag_rows
from .ranks import Ranks, find_group


def shard(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: Any = None,
    mesh: Any = None,
    order: str = CONTIGUOUS,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns this rank's part of a tensor that every rank has whole, without messages.

    Args:
        tensor: of any dtype, with the tokens of all ranks in one dimension.
        dim: that dimension.
        group: as in `flash_attn_func`; mesh and order too.
        mesh: see group.
        order: see group.
        cu_seqlens: (batch + 1,), int32: where packed sequences begin and end; None: `dim` is one
            sequence.

    Returns:
        A copy of this rank's tokens. Gradients pass through. With cu_seqlens, zeros stand for
        missing tokens: in the contiguous order behind all tokens that don't divide by the ranks,
        which `unshard` returns too; in the zigzag order behind each sequence whose length does not
        divide by twice the ranks. flash_attn_varlen_func takes them for tokens of no sequence.

    Raises:
        ArgumentError: without cu_seqlens, the tokens don't divide by the ranks (by twice as many in
            the zigzag order); or there is no such dimension.
        ArgumentTypeError: a wrong type; DtypeError: cu_seqlens is not torch.int32.
    """
    ranks = Ranks.of(find_group(group, mesh))
    dim, order, starts = _dimension(tensor, dim), check_order(order), _starts(cu_seqlens)
    tokens = tensor.shape[dim]
    each = -(-tokens // ranks.size)
    if starts is None and tokens % ranks.size:
        raise ArgumentError(
            f"tensor: expected a number of tokens that divides by {ranks.size} ranks, got "
            f"{tokens}; pass cu_seqlens, and call flash_attn_varlen_func"
        )
    if starts is not None and order == ZIGZAG:
        if starts[-1:] != (tokens,):
            raise ArgumentError(
                f"cu_seqlens: expected {tokens} tokens with order='zigzag', as in the tensor, "
                f"got {starts[-1] if starts else 'none'}"
            )
        each = int(zigzag_rows(torch.tensor(starts).diff(), ranks.size).sum())
    index = _order(each, ranks, order, starts)[ranks.rank].clamp(max=tokens)
    if bool((index == tokens).any()):
        zeros = tensor.new_zeros((*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]))
        tensor = torch.cat([tensor, zeros], dim)
    return tensor.index_select(dim, index.to(tensor.device))


@reported
def unshard(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: Any = None,
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
    ranks = Ranks.of(find_group(group, mesh))
    dim, order, starts = _dimension(tensor, dim), check_order(order), _starts(cu_seqlens)
    ranks.check(tensor.device)
    part = tensor.detach()
    with ranks.agreement.taking_part():
        facts: dict[str, Any] = {"tensor.dtype": str(part.dtype), "dim": dim, "order": order}
        facts["cu_seqlens"] = starts
        facts.update((f"tensor.shape[{at}]", size) for at, size in enumerate(part.shape))
        ranks.agreement.agree("unshard", json.dumps(facts))
        every = part.contiguous().flatten().view(torch.uint8)
        sizes = [every.numel()] * ranks.size
        data = every.repeat(ranks.size)
        arrived = torch.empty_like(data) if ranks.size > 1 else data
        ranks.all_to_all(data, arrived, sizes, sizes, "parts of a tensor").wait()
        parts = arrived.view(part.dtype).view(ranks.size, *part.shape)
    whole = torch.cat(list(parts), dim)
    index = torch.cat(_order(part.shape[dim], ranks, order, starts)).argsort()
    if starts is not None and order == ZIGZAG:
        index = index[: starts[-1]]
    return whole.index_select(dim, index.to(whole.device))


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


def _starts(cu_seqlens: torch.Tensor | None) -> tuple[int, ...] | None:
    """Checks cu_seqlens, and returns their values."""
    if cu_seqlens is None:
        return None
    check_cu_seqlens("cu_seqlens", cu_seqlens, None, None)
    return tuple(cu_seqlens.tolist())


def _order(
    each: int, ranks: Ranks, order: str, starts: tuple[int, ...] | None
) -> list[torch.Tensor]:
    """Returns, for each rank, the indices of its `each` tokens."""
    whole = (0, each * ranks.size) if starts is None else starts
    name = "q" if starts is None else "cu_seqlens"
    layout = layout_of(whole, each, ranks.size, order, name, dense=starts is None)
    none = whole[-1] if order == ZIGZAG else None
    return [tokens_of(layout, rank, each, none) for rank in range(ranks.size)]
