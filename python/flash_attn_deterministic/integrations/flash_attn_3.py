"""FlashAttention-3's functions by their signatures, for code that imports them.

With `flash_attn_deterministic.as_flash_attn`, `flash_attn_interface` and
`flash_attn_3.flash_attn_interface` are this module. num_splits, pack_gqa, sm_margin and
scheduler_metadata are about a schedule, which has no effect on bits here: they are ignored. Sizes
and errors are those of this package's functions of the same names.

Source:
    hopper/flash_attn_interface.py of flash-attention, 3.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import interface
from ..errors import ArgumentError, UnsupportedError
from .low_level import starts_of

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Any, because calls unpack arguments.
_ours: Any = interface


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """Calls `flash_attn_deterministic.flash_attn_func`; with return_attn_probs: (out, lse)."""
    _check(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _check(attention_chunk=attention_chunk)
    scores = 0.0, softmax_scale, causal, window_size, softcap
    out = _ours.flash_attn_func(q, k, v, *scores, None, deterministic, return_attn_probs)
    return _two(out)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """Calls this package's `flash_attn_varlen_func`; with return_attn_probs: (out, lse)."""
    _check(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _check(attention_chunk=attention_chunk, seqused_q=seqused_q)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = 0.0, softmax_scale, causal, window_size, softcap
    rest = None, deterministic, return_attn_probs
    return _two(
        _ours.flash_attn_varlen_func(q, k, v, *lengths, *scores, *rest, seqused_k=seqused_k)
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> _Result:
    """Calls this package's `flash_attn_with_kvcache`; with cu_seqlens_q, q (total_q, ...), packed.

    Packed queries take a page_table and cache_seqlens (batch,), and append nothing.
    """
    _check(qv=qv, q_descale=q_descale)
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    _check(attention_chunk=attention_chunk, cu_seqlens_k_new=cu_seqlens_k_new)
    _check(rotary_seqlens=rotary_seqlens)
    if cu_seqlens_q is None:
        rotary = rotary_cos, rotary_sin
        cache = cache_seqlens, cache_batch_idx, cache_leftpad, page_table
        scores = softmax_scale, causal, window_size, softcap, rotary_interleaved
        rest = None, 0, return_softmax_lse
        result: _Result = _ours.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, *rotary, *cache, *scores, *rest, **descales
        )
        return result
    _check(k=k, v=v, rotary_cos=rotary_cos, cache_batch_idx=cache_batch_idx)
    _check(cache_leftpad=cache_leftpad)
    if page_table is None or max_seqlen_q is None or not isinstance(cache_seqlens, torch.Tensor):
        raise ArgumentError(
            "cu_seqlens_q: expected together with max_seqlen_q, page_table and a tensor of "
            "cache_seqlens"
        )
    lengths = (
        cu_seqlens_q,
        starts_of(cache_seqlens),
        max_seqlen_q,
        page_table.shape[1] * k_cache.shape[1],
    )
    scores_ = 0.0, softmax_scale, causal, window_size, softcap
    rest_ = None, None, return_softmax_lse, page_table
    arguments = q, k_cache, v_cache, *lengths, *scores_, *rest_
    return _two(_ours.flash_attn_varlen_func(*arguments, seqused_k=cache_seqlens, **descales))


def _two(result: Any) -> _Result:
    """Returns out, or out and the log-sum-exp: there is no third result."""
    found: _Result = result[:2] if isinstance(result, tuple) else result
    return found


def _check(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) or value:
            raise UnsupportedError(f"{name}: expected its default; it is not supported")
