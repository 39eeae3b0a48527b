"""Attention over packed sequences that are distributed over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UnsupportedError
from ..types import Deterministic, Lengths
from .call import attend, check_packed, checked, resolve
from .messages.groups import find_groups
from .planning.layout import CONTIGUOUS


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    split_size: int | None = None,
    group: Any = None,
    heads_group: Any = None,
    mesh: Any = None,
    order: str = CONTIGUOUS,
    heads_k_stride: int | None = None,
) -> Any:
    """Computes `flash_attn_deterministic.flash_attn_varlen_func` of tokens on several ranks.

    cu_seqlens are those of the tokens of all ranks. In the contiguous order rank r holds the r-th
    of P parts of these, and a sequence may begin on one rank and end on another. In the zigzag
    order each sequence is cut as `dense.flash_attn_func` shows, and its length divides by 2 P.

    The host reads cu_seqlens, and waits for those on a CUDA device.

    Args:
        q: (total_q, nheads, head_dim), the tokens of this rank; equally many on each rank.
        k: (total_k, nheads_k, head_dim), likewise.
        v: like k.
        cu_seqlens_q: (batch + 1,), int32: tokens of all ranks before each sequence, and their
            total; in the contiguous order the total may be less than that of all ranks.
        cu_seqlens_k: (batch + 1,), int32, the same for k.
        max_seqlen_q: no effect: the host reads the lengths.
        max_seqlen_k: no effect.
        dropout_p: has to be 0.0.
        softmax_scale: as on one device; so are the arguments after it that are not listed here.
        alibi_slopes: has to be None.
        return_attn_probs: whether to return softmax_lse as well.
        block_table: has to be None.
        group: as in `dense.flash_attn_func`; so are the arguments after it.

    Returns:
        out (total_q, nheads, head_dim); with return_attn_probs the tuple of out, softmax_lse
        (nheads, total_q) in float32 and an empty tensor (0,). Rows of no sequence: out 0,
        softmax_lse +inf.

    Raises:
        As `dense.flash_attn_func`.

    Source:
        As `dense.flash_attn_func`.
    """
    groups = find_groups(group, heads_group, mesh)

    def prepare() -> Any:
        if block_table is not None:
            raise UnsupportedError("block_table: expected None on several ranks")
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scores = softmax_scale, causal, window_size, softcap
        options = dropout_p, *scores, split_size, deterministic
        return resolve(
            *(groups, q, k, v, lengths, options),
            *(alibi_slopes, order, heads_k_stride, return_attn_probs),
        )

    options, settings = checked(groups, (q, k, v), prepare)
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options, settings)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """Computes `flash_attn_varlen_func` with q, k and v in one tensor.

    Args:
        qkv: (total, 3, nheads, head_dim), the tokens of this rank.
        cu_seqlens: (batch + 1,), int32, of all ranks.
        max_seqlen: no effect.
        args: those of `flash_attn_varlen_func` after max_seqlen_k.
        kwargs: likewise.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        As `flash_attn_varlen_func`.
    """
    check_packed("qkv", qkv, "(total tokens, 3, nheads, head_dim)", kwargs)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Computes `flash_attn_varlen_func` with k and v in one tensor.

    Args:
        q: (total_q, nheads, head_dim), the tokens of this rank.
        kv: (total_k, 2, nheads_k, head_dim), likewise.
        args: those of `flash_attn_varlen_func` after v.
        kwargs: likewise.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        As `flash_attn_varlen_func`.
    """
    check_packed("kv", kv, "(total tokens, 2, nheads_k, head_dim)", kwargs)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)
