"""Attention over sequences of one length, with q, k and v in one tensor."""

from __future__ import annotations

from typing import Literal, overload

import torch

from .._checks.tensors import Names, check_packed
from .dense import attend

_QKV = Names("qkv", "qkv", "qkv")
_KV = Names("q", "kv", "kv")


@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
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
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
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


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
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
    """Computes attention as `flash_attn_func` does, with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), float16 or bfloat16; q, k and v in this order.
            Their strides are used as they are: nothing is copied that `flash_attn_func` would not.
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
        out (batch, seqlen, nheads, head_dim); with return_attn_probs as in `flash_attn_func`.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; as in `flash_attn_func`.
        NotDeterministicError: a RuntimeError; as in `flash_attn_func`.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Source:
        flash_attn_qkvpacked_func of flash_attn 2.8.3 (flash_attn_interface.py);
        FlashAttention-2 (Dao, 2023, arXiv 2307.08691).
    """
    check_packed("qkv", qkv, 3, "(batch, seqlen, 3, nheads, head_dim)")
    q, k, v = qkv.unbind(2)
    return attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        split_size,
        _QKV,
    )


@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
    """Computes attention as `flash_attn_func` does, with k and v in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16.
        kv: (batch, seqlen_k, 2, nheads_k, head_dim), like q; k and v in this order. nheads is a
            multiple of nheads_k.
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
        out (batch, seqlen_q, nheads, head_dim); with return_attn_probs as in `flash_attn_func`.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; as in `flash_attn_func`.
        NotDeterministicError: a RuntimeError; as in `flash_attn_func`.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Source:
        flash_attn_kvpacked_func of flash_attn 2.8.3 (flash_attn_interface.py);
        FlashAttention-2 (Dao, 2023, arXiv 2307.08691).
    """
    check_packed("kv", kv, 2, "(batch, seqlen_k, 2, nheads_k, head_dim)")
    k, v = kv.unbind(2)
    return attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        split_size,
        _KV,
    )
