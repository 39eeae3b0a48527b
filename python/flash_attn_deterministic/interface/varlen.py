"""Attention over sequences of several lengths, packed into one tensor."""

from __future__ import annotations

from typing import Literal, overload

import torch

from .._checks import kernels, numbers, tensors
from .._checks import varlen as checks
from ._options import contiguous, padded, resolve_options


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

    A row has the bits that `flash_attn_func` gives it.

    Args:
        q: (total_q, nheads, head_dim), float16 or bfloat16, on the CPU or a CUDA device; total_q
            is the number of queries of all sequences. head_dim is 1 to 256.
        k: (total_k, nheads_k, head_dim), like q; with block_table (num_blocks, page_block_size,
            nheads_k, head_dim), where page_block_size is a multiple of 16. nheads is a multiple of
            nheads_k: query head h uses key and value head h // (nheads / nheads_k).
        v: like k.
        cu_seqlens_q: (batch + 1,), int32: tokens of q before each sequence, and their total.
        cu_seqlens_k: (batch + 1,), int32, the same for k.
        max_seqlen_q: length of the longest sequence of q, or more; an int, because the host has to
            know it.
        max_seqlen_k: the same for k.
        dropout_p: only 0.0 so far.
        softmax_scale: positive, finite factor of q k^T; None: head_dim ** -0.5.
        causal: whether to apply the causal mask above.
        window_size: (left, right), how many keys before and after its own position a query sees;
            -1: no limit. With causal, right counts as 0.
        softcap: 0.0, or c > 0: scores become c * tanh(score / c) after softmax_scale.
        alibi_slopes: (nheads,) or (batch, nheads), float32; adds -slope * |i + seqlen_k - seqlen_q
            - j| to the score of query i and key j.
        deterministic: about the backward pass, in flash_attn as here; None follows the mode of
            this package, where flash_attn's default is False. The forward pass ignores it: it
            follows the mode.
        return_attn_probs: as in `flash_attn_func`.
        block_table: (batch, max_num_blocks_per_seq), int32: which blocks of k and v hold a
            sequence, in order. Sequences have the lengths of cu_seqlens_k or seqused_k.
        seqused_k: (batch,), int32: how many keys of each sequence count; None: all.
        leftpad_k: (batch,), int32: how many keys at the start of each sequence do not count; None:
            0. Not together with block_table.
        split_size: tokens per split, a multiple of the kernels' 64 keys per block; 0: one split;
            None: that of the mode. Part of what the bits depend on. Without effect where the mode
            is not enabled.

    Returns:
        out (total_q, nheads, head_dim) in q's dtype; with return_attn_probs the tuple of out,
        softmax_lse (nheads, total_q) in float32 and an empty tensor, as in `flash_attn_func`.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; dropout.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.
    """
    out, softmax_lse = attend(
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
        split_size,
        block_table=block_table,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
    )
    return (out, softmax_lse, q.new_empty(0)) if return_attn_probs else out


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
    split_size: int | None,
    *,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    names: checks.Names = checks.NAMES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks the arguments of a call and runs it; `names` are the caller's.

    Returns:
        out and softmax_lse.
    """
    numbers.check_dropout(dropout_p)
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
    _, nheads, head_dim = q.shape
    tensors.check_alibi(alibi_slopes, cu_seqlens_q.shape[0] - 1, nheads, q.device)
    options = resolve_options(head_dim, softmax_scale, causal, window_size, softcap, split_size)
    kernels.check_kernels(q.device, q.dtype, head_dim)
    out, softmax_lse = torch.ops.flash_attn_deterministic.varlen_fwd(
        padded(q),
        padded(k),
        padded(v),
        contiguous(cu_seqlens_q),
        contiguous(cu_seqlens_k),
        contiguous(seqused_k),
        contiguous(leftpad_k),
        contiguous(block_table),
        contiguous(alibi_slopes),
        max_seqlen_q,
        max_seqlen_k,
        *options,
    )
    return out[..., :head_dim], softmax_lse
