"""Attention over sequences of several lengths, packed into one tensor."""

from __future__ import annotations

import functools
from typing import Literal, overload

import torch

from .._checks import kernels, numbers, tensors
from .._checks import varlen as checks
from ._options import (
    contiguous,
    draw_rng_state,
    padded,
    resolve_options,
    returned,
    scores,
    slopes_for_op,
)


@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    block_table: torch.Tensor | None = ...,
    *,
    seqused_k: torch.Tensor | None = ...,
    leftpad_k: torch.Tensor | None = ...,
    split_size: int | None = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    block_table: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
    leftpad_k: torch.Tensor | None = ...,
    split_size: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    split_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention for each sequence of a batch, as `flash_attn_func` does for one alone.

    Masks and lengths are those of each sequence; with causal=True, for instance, of a sequence of
    2 queries and 5 keys (visible keys are 1; more pictures at `flash_attn_func`):

        1 1 1 1 0
        1 1 1 1 1

    A row has the bits that `flash_attn_func` gives it. q, k and v get gradients, as there; those of
    rows that belong to no sequence are 0. With block_table, seqused_k or leftpad_k there is no
    backward: if a tensor requires a gradient, such a call raises, unless torch.no_grad() is in
    force.

    What the tensors of lengths and indices hold is the caller's promise on a CUDA device, where
    reading them would make the host wait: cu_seqlens_q and cu_seqlens_k begin with 0, don't
    decrease and end within q and k; seqused_k and leftpad_k lie within their sequence, and used
    pages within k. For CPU tensors all of it is checked.

    Args:
        q: (total_q, nheads, head_dim), float16 or bfloat16, on the CPU or a CUDA device; total_q
            is the number of queries of all sequences. head_dim is 1 to 256.
        k: (total_k, nheads_k, head_dim), like q; with block_table (num_blocks, page_block_size,
            nheads_k, head_dim), where page_block_size is a multiple of 16. nheads is a multiple of
            nheads_k: query head h uses key and value head h // (nheads / nheads_k).
        v: like k.
        cu_seqlens_q: (batch + 1,), int32: tokens of q before each sequence, and their total, which
            may be less than total_q.
        cu_seqlens_k: (batch + 1,), int32, the same for k.
        max_seqlen_q: length of the longest sequence of q, or more; an int, because the host has to
            know it. Less is an error, which only the CPU can tell; a CUDA device does not compute
            the rows beyond.
        max_seqlen_k: the same for the keys that count of a sequence; a CUDA device leaves out those
            beyond.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: positive factor of q k^T, 2**-126 to 2**127; None: head_dim ** -0.5.
        causal: whether to apply the causal mask above.
        window_size: (left, right), how many keys before and after its own position a query sees;
            -1: no limit. With causal, right counts as 0.
        softcap: 0.0, or c > 0: scores become c * tanh(score / c) after softmax_scale; c and
            softmax_scale / c are in the same range as softmax_scale.
        alibi_slopes: (nheads,) or (batch, nheads), float32; adds -slope * |i + seqlen_k - seqlen_q
            - j| to the score of query i and key j. Without gradient.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.
        block_table: (batch, max_num_blocks_per_seq), int32: which blocks of k and v hold a
            sequence, in order. Sequences have the lengths of cu_seqlens_k or seqused_k.
        seqused_k: (batch,), int32: how many keys of each sequence count; None: all.
        leftpad_k: (batch,), int32: how many keys at the start of each sequence do not count; None:
            0. Not together with block_table.
        split_size: tokens per split, a multiple of the kernels' 64 keys per block, at most 2^29;
            0: one split; None: that of the mode. Part of what the bits depend on. Without effect
            where the mode is not enabled.

    Returns:
        out (total_q, nheads, head_dim) in q's dtype; with return_attn_probs the tuple of out,
        softmax_lse (nheads, total_q) in float32 and S_dmask (batch, nheads, max_seqlen_q,
        max_seqlen_k), 0 beyond a sequence; without dropout an empty tensor. See `flash_attn_func`.
        Rows of no sequence, on every device: out 0, softmax_lse +inf.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; a gradient through what has no backward, or as in
            `flash_attn_func`.
        NotDeterministicError: a RuntimeError; as in `flash_attn_func`.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Source:
        flash_attn_varlen_func of flash_attn 2.8.3 (flash_attn_interface.py); FlashAttention-2 (Dao,
        2023, arXiv 2307.08691).
    """
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
        block_table=block_table,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool | None,
    return_attn_probs: bool,
    split_size: int | None,
    *,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    names: checks.Names = checks.NAMES,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Checks the arguments of a call and runs it; `names` are the caller's.

    Returns:
        As `flash_attn_varlen_func`.
    """
    numbers.check_dropout(dropout_p)
    numbers.check_flag("return_attn_probs", return_attn_probs)
    checks.check_varlen(q, k, v, block_table is not None, names)
    checks.check_lengths(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k,
        leftpad_k,
        block_table,
        q.device,
        names,
    )
    checks.check_no_gradient((q, k, v), seqused_k, leftpad_k, block_table)
    _, nheads, head_dim = q.shape
    tensors.check_alibi(alibi_slopes, cu_seqlens_q.shape[0] - 1, nheads, q.device)
    options = resolve_options(
        head_dim, softmax_scale, causal, window_size, softcap, split_size, deterministic
    )
    kernels.check_kernels(q.device, q.dtype, head_dim)
    kernels.check_combination(q.device, softcap, dropout_p)
    alibi_slopes = slopes_for_op(alibi_slopes)
    rng_state = draw_rng_state(dropout_p, q.device)
    out, softmax_lse = torch.ops.flash_attn_deterministic.varlen_fwd(
        padded(q),
        padded(k),
        padded(v),
        contiguous(cu_seqlens_q),
        contiguous(cu_seqlens_k),
        contiguous(seqused_k),
        contiguous(leftpad_k),
        contiguous(block_table),
        alibi_slopes,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
        float(dropout_p),
        *options,
    )
    signed_probs = None
    if rng_state is not None and return_attn_probs:
        # Imported here, as the reference is wherever it is used, to keep the import short.
        from ..reference import _probs

        signed_probs = functools.partial(
            _probs.varlen_signed_probs,
            q,
            k,
            softmax_lse,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            leftpad_k,
            block_table,
            alibi_slopes,
            rng_state,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            scores(options),
        )
    return returned(out[..., :head_dim], softmax_lse, return_attn_probs, signed_probs)
