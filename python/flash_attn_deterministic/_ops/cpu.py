"""The ops on CPU tensors: the reference."""

from __future__ import annotations

from typing import Any

import torch

from .._checks.split import check_split_size
from .schemas import Gradients, Outputs


def register(library: Any) -> None:
    """Registers the CPU implementations."""
    library.impl("fwd", _fwd, "CPU")
    library.impl("varlen_fwd", _varlen_fwd, "CPU")
    library.impl("kvcache_fwd", _kvcache_fwd, "CPU")
    library.impl("bwd", _bwd, "CPU")
    library.impl("varlen_bwd", _varlen_bwd, "CPU")


# The reference is imported where it is called, to keep the package's import short. It knows no
# other order than the split tree: without `deterministic` it runs the tree of one split. Its
# backward has one order for every call.


def _fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    split_size: int,
    deterministic: bool,
    deterministic_bwd: bool,
) -> Outputs:
    from .. import reference

    return reference.attention(
        q,
        k,
        v,
        softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
        split_size=_tree(split_size, deterministic, q),
    )


def _varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    split_size: int,
    deterministic: bool,
    deterministic_bwd: bool,
) -> Outputs:
    from .. import reference

    return reference.varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
        split_size=_tree(split_size, deterministic, q),
    )


def _kvcache_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    split_size: int,
    deterministic: bool,
) -> Outputs:
    from .. import reference

    return reference.kvcache_attention(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=False,
        window=(window_left, window_right),
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        split_size=_tree(split_size, deterministic, q),
    )


def _bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
) -> Gradients:
    from .. import reference

    return reference.attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )


def _varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
) -> Gradients:
    from .. import reference

    return reference.varlen_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )


def _tree(split_size: int, deterministic: bool, q: torch.Tensor) -> int:
    if not deterministic:
        return 0
    check_split_size(split_size, q.shape[-1])
    return split_size
