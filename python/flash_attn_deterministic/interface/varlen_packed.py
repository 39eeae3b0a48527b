"""Attention over sequences of several lengths, with q, k and v in one tensor."""

from __future__ import annotations

from typing import Literal, overload

import torch

from .._checks.tensors import check_packed
from .._checks.varlen import NAMES
from .varlen import attend

_QKV = NAMES._replace(
    q="qkv",
    k="qkv",
    v="qkv",
    cu_seqlens_q="cu_seqlens",
    cu_seqlens_k="cu_seqlens",
    max_seqlen_q="max_seqlen",
    max_seqlen_k="max_seqlen",
)
_KV = NAMES._replace(k="kv", v="kv")


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    split_size: int | None = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
    split_size: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention as `flash_attn_varlen_func` does, with q, k and v in one tensor.

    Args:
        qkv: (total, 3, nheads, head_dim), float16 or bfloat16; q, k and v in this order.
        cu_seqlens: (batch + 1,), int32: tokens before each sequence, and their total; read as in
            `flash_attn_varlen_func`.
        max_seqlen: length of the longest sequence, or more, as in `flash_attn_varlen_func`.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`, with its mask.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: (nheads,) or (batch, nheads), float32, as in `flash_attn_func`; without
            gradient.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.
        split_size: as in `flash_attn_func`.

    Returns:
        out (total, nheads, head_dim), 0 in rows of no sequence; with return_attn_probs as in
        `flash_attn_varlen_func`.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; as in `flash_attn_func`.
        NotDeterministicError: a RuntimeError; as in `flash_attn_func`.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Source:
        flash_attn_varlen_qkvpacked_func of flash_attn 2.8.3 (flash_attn_interface.py);
        FlashAttention-2 (Dao, 2023, arXiv 2307.08691).
    """
    check_packed("qkv", qkv, 3, "(total tokens, 3, nheads, head_dim)")
    q, k, v = qkv.unbind(1)
    return attend(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        split_size,
        names=_QKV,
    )


@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    split_size: int | None = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
    split_size: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention as `flash_attn_varlen_func` does, with k and v in one tensor.

    Args:
        q: (total_q, nheads, head_dim), float16 or bfloat16.
        kv: (total_k, 2, nheads_k, head_dim), like q; k and v in this order. nheads is a multiple of
            nheads_k.
        cu_seqlens_q: (batch + 1,), int32: tokens of q before each sequence, and their total.
        cu_seqlens_k: (batch + 1,), int32, the same for kv.
        max_seqlen_q: length of the longest sequence of q, or more, as in `flash_attn_varlen_func`;
            an int, because the host has to know it.
        max_seqlen_k: the same for kv.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`, with its mask.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: (nheads,) or (batch, nheads), float32, as in `flash_attn_func`; without
            gradient.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.
        split_size: as in `flash_attn_func`.

    Returns:
        out (total_q, nheads, head_dim), 0 in rows of no sequence; with return_attn_probs as in
        `flash_attn_varlen_func`.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; as in `flash_attn_func`.
        NotDeterministicError: a RuntimeError; as in `flash_attn_func`.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Source:
        flash_attn_varlen_kvpacked_func of flash_attn 2.8.3 (flash_attn_interface.py);
        FlashAttention-2 (Dao, 2023, arXiv 2307.08691).
    """
    check_packed("kv", kv, 2, "(total tokens, 2, nheads_k, head_dim)")
    k, v = kv.unbind(1)
    return attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        split_size,
        names=_KV,
    )
