"""Attention over sequences of several lengths, packed one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks.tensors import check_tensor
from ..types import Deterministic, Lengths
from .call import WithMax, WithProbs, WithProbsAndMax, attend, typed


@typed
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
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    split_size: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_max_logits: bool = False,
    k_descale: float | torch.Tensor | None = None,
    v_descale: float | torch.Tensor | None = None,
    dropout_seeds: torch.Tensor | None = None,
) -> torch.Tensor | WithMax | WithProbs | WithProbsAndMax:
    """Computes attention for each sequence of a batch, as `flash_attn_func` does for one alone.

    Masks and lengths are those of each sequence; with causal=True, for instance, of a sequence of
    2 queries and 5 keys (visible keys are 1; more pictures at `flash_attn_func`):

        1 1 1 1 0
        1 1 1 1 1

    A row has the bits that `flash_attn_func` gives it. q, k and v get gradients, as there; those of
    rows that belong to no sequence are 0. With block_table, seqused_k or leftpad_k there is no
    backward: it raises. Under torch.compile, which traces both together, the call itself raises if
    a tensor requires a gradient, except under torch.no_grad().

    On a CUDA device the caller has to ensure that lengths and indices are right, as reading them
    would make the host wait: cu_seqlens_q and cu_seqlens_k begin with 0, don't decrease and end
    within q and k; seqused_k and leftpad_k lie within their sequence, and used pages within k. On
    the CPU all of this is checked.

    Args:
        q: (total_q, nheads, head_dim), float16 or bfloat16, on the CPU or a CUDA device; total_q
            is the number of queries of all sequences. head_dim is 1 to 256.
        k: (total_k, nheads_k, head_dim), like q; with block_table (num_blocks, page_block_size,
            nheads_k, head_dim), where page_block_size is a multiple of 16. nheads is a multiple of
            nheads_k: query head h uses key and value head h // (nheads / nheads_k). With
            block_table it may be float8_e4m3fn, as k_cache of `flash_attn_with_kvcache`.
        v: like k; its head_dim_v may be another one, as in `flash_attn_func`.
        cu_seqlens_q: (batch + 1,), int32: tokens of q before each sequence, and their total, which
            may be less than total_q.
        cu_seqlens_k: (batch + 1,), int32, the same for k.
        max_seqlen_q: length of the longest sequence of q, or more. Less is an error, which is
            found on the CPU only; a CUDA device does not compute the rows beyond.
        max_seqlen_k: the same for the keys in use; a CUDA device ignores those beyond.
        dropout_p: as in `flash_attn_func`; so are the arguments up to return_attn_probs.
        alibi_slopes: (nheads,) or (batch, nheads), float32.
        block_table: (batch, max_num_blocks_per_seq), int32: which blocks of k and v hold a
            sequence, in order. Sequences have the lengths of cu_seqlens_k or seqused_k.
        seqused_k: (batch,), int32: how many keys of each sequence are in use; None: all.
        leftpad_k: (batch,), int32: how many keys at the start of each sequence are padding; None:
            0. Not together with block_table.
        split_size: as in `flash_attn_func`; so are the arguments after it.
        learnable_sink: see split_size.
        return_max_logits: see split_size; the rows of all sequences count, and no other.
        k_descale: of keys in float8_e4m3fn, as in `flash_attn_with_kvcache`.
        v_descale: the same of values.
        dropout_seeds: as in `flash_attn_func`; batch is that of cu_seqlens_q. A sequence has the
            bits that it has alone, dense or packed.

    Returns:
        out (total_q, nheads, head_dim_v) in q's dtype; with return_attn_probs the tuple of out,
        softmax_lse (nheads, total_q) in float32 and S_dmask (batch, nheads, max_seqlen_q,
        max_seqlen_k), 0 beyond a sequence; without dropout an empty tensor. See `flash_attn_func`.
        Rows of no sequence, on every device: out 0, softmax_lse +inf. With return_max_logits the
        last is max_logits (nheads,), as in `flash_attn_func`.

    Raises:
        As `flash_attn_func`; UnsupportedError from the backward of a call that has none.

    Source:
        The function of this name in flash_attn 2.8.3.
    """
    lengths = Lengths(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
    )
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    descales = k_descale, v_descale
    others = return_attn_probs, learnable_sink, return_max_logits, descales
    results: torch.Tensor | WithMax | WithProbs | WithProbsAndMax = attend(
        (q, k, v), lengths, options, alibi_slopes, *others, dropout_seeds=dropout_seeds
    )
    return results


@typed
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
    dropout_seeds: torch.Tensor | None = None,
) -> torch.Tensor | WithProbs:
    """Computes attention as `flash_attn_varlen_func` does, with q, k and v in one tensor.

    Args:
        qkv: (total, 3, nheads, head_dim), float16 or bfloat16; q, k and v in this order.
        cu_seqlens: (batch + 1,), int32: tokens before each sequence, and their total.
        max_seqlen: length of the longest sequence, or more, as in `flash_attn_varlen_func`.
        dropout_p: as in `flash_attn_func`; so are the arguments after it.

    Returns:
        out (total, nheads, head_dim), 0 in rows of no sequence; with return_attn_probs as in
        `flash_attn_varlen_func`.

    Raises:
        As `flash_attn_func`.

    Source:
        flash_attn 2.8.3, under this name.
    """
    lengths = Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    results: torch.Tensor | WithProbs = attend(
        (None, qkv), lengths, options, alibi_slopes, return_attn_probs, dropout_seeds=dropout_seeds
    )
    return results


@typed
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
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
    dropout_seeds: torch.Tensor | None = None,
) -> torch.Tensor | WithProbs:
    """Computes attention as `flash_attn_varlen_func` does, with k and v in one tensor.

    Args:
        q: (total_q, nheads, head_dim), float16 or bfloat16.
        kv: (total_k, 2, nheads_k, head_dim), like q; k and v in this order. nheads is a multiple of
            nheads_k.
        cu_seqlens_q: as in `flash_attn_varlen_func`; so are cu_seqlens_k, max_seqlen_q and
            max_seqlen_k.
        dropout_p: as in `flash_attn_func`; so are the arguments after it.

    Returns:
        out (total_q, nheads, head_dim), 0 in rows of no sequence; with return_attn_probs as in
        `flash_attn_varlen_func`.

    Raises:
        As `flash_attn_func`.

    Source:
        flash_attn 2.8.3, under this name.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    if q is None:  # which in an op says that q is in kv
        check_tensor("q", q)
    results: torch.Tensor | WithProbs = attend(
        (q, kv), lengths, options, alibi_slopes, return_attn_probs, dropout_seeds=dropout_seeds
    )
    return results
