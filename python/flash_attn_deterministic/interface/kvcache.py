"""Attention over a cache of keys and values, which the same call can append to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from .._checks import derivatives, kernels, numbers, tensors
from .._checks import kvcache as checks
from .._ops.arguments import Options
from .._ops.autograd import run
from .._ops.dispatch import needs_dispatcher
from ._call import (
    WithLse,
    contiguous,
    op_checks,
    padded,
    resolve_options,
    run_then_check,
    slopes_for_op,
    typed,
)


def _writable() -> AbstractContextManager[Any]:
    """Lets torch write to a cache that was made in inference mode, as the kernels do."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode()


@typed
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: Literal[False] = False,
    *,
    split_size: int | None = None,
) -> torch.Tensor | WithLse:
    """Appends k and v to a cache, in place, and computes attention over the cache.

    A sequence then has seqlen_k = cache_seqlens + seqlen_new keys, and the masks are those of
    `flash_attn_func` for that length; the rest of the cache is not read. With causal=True, for
    instance, visible keys are 1 for 2 queries, 3 cached and 2 new keys:

        1 1 1 1 0
        1 1 1 1 1

    A row has the bits that `flash_attn_func` gives it. There is no gradient: out never requires
    one, as in flash_attn.

    On a CUDA device the caller has to ensure that the values of cache_seqlens, cache_batch_idx,
    cache_leftpad and block_table are right, as reading them would make the host wait: sequences
    with their new tokens fit into the cache, which has all the rows and used pages. On the CPU all
    of this is checked before anything is written.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU or a CUDA device.
            head_dim is 1 to 256; if no multiple of 8, the cache is copied at each call.
        k_cache: (batch_cache, seqlen_cache, nheads_k, head_dim), like q, last dimension contiguous;
            with block_table (num_blocks, page_block_size, nheads_k, head_dim), where
            page_block_size is a multiple of 16. nheads is a multiple of nheads_k. batch_cache may
            be more than batch. On a CUDA device, if head_dim is a multiple of 8, rows start at
            multiples of 16 bytes: strides of dimensions larger than 1 are multiples of 8 elements.
        v_cache: like k_cache.
        k: (batch, seqlen_new, nheads_k, head_dim), like q: written to k_cache at cache_seqlens;
            None: nothing to append. The cache must have room.
        v: like k; both or none.
        rotary_cos: (seqlen_ro, rotary_dim / 2), like q: rotates k, at positions cache_seqlens and
            following, and q: at the same positions with causal or a window, otherwise all at
            cache_seqlens. rotary_dim is a multiple of 16 and at most head_dim; seqlen_ro is at
            least the capacity of the cache for a sequence. More queries than new keys must not go
            beyond it either: the call raises on the CPU or if cache_seqlens is an int; otherwise a
            CUDA device uses the last row for them. Only together with k.
        rotary_sin: like rotary_cos; both or none.
        cache_seqlens: tokens of each sequence before k is appended: (batch,), int32, or one int for
            all; None: seqlen_cache.
        cache_batch_idx: (batch,), int32: the place of each sequence in the cache; None: 0, 1, ...
            Equal ones must not be appended to. Not together with block_table.
        cache_leftpad: (batch,), int32: where each sequence begins in the cache; None: 0. Not
            together with block_table.
        block_table: (batch, max_num_blocks_per_seq), int32: which blocks of the cache hold a
            sequence, in order.
        softmax_scale: as in `flash_attn_func`; so are causal, window_size, softcap and split_size.
        alibi_slopes: (nheads,) or (batch, nheads), float32, as in `flash_attn_func`.
        rotary_interleaved: True: dimensions 0 and 1, 2 and 3 and so on are rotated together; False:
            0 and rotary_dim / 2, 1 and rotary_dim / 2 + 1 and so on, as in GPT-NeoX.
        num_splits: 0 or more; accepted for compatibility, without effect on bits and schedule. See
            split_size.
        return_softmax_lse: whether to return softmax_lse too.

    Returns:
        out (batch, seqlen_q, nheads, head_dim) in q's dtype; with return_softmax_lse the tuple of
        out and softmax_lse (batch, nheads, seqlen_q) in float32, as in `flash_attn_func`.

    Raises:
        As `flash_attn_func`.

    Source:
        flash_attn_with_kvcache of flash_attn 2.8.3 (flash_attn_interface.py); FlashAttention-2
        (Dao, 2023, arXiv 2307.08691). Rotary embedding: RoFormer (Su et al., 2021, arXiv
        2104.09864).
    """
    numbers.check_num_splits(num_splits)
    interleaved = numbers.check_flag("rotary_interleaved", rotary_interleaved)
    with_lse = numbers.check_flag("return_softmax_lse", return_softmax_lse)
    options_given = 0.0, softmax_scale, causal, window_size, softcap, split_size
    given = (
        *(q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx),
        *(cache_leftpad, block_table, alibi_slopes),
    )
    seqlens = cache_seqlens
    # A length that is an int is checked here: the op does not read the tensor made of it.
    op_checks_first = (seqlens is None or isinstance(seqlens, torch.Tensor)) and op_checks(
        4, q, k_cache, v_cache, k, v
    )
    if op_checks_first:
        options = resolve_options(q.shape[3], *options_given)
    else:
        seqlens, options = _check(given, options_given)
    if seqlens is not None and not isinstance(seqlens, torch.Tensor):
        seqlens = torch.full((q.shape[0],), seqlens, dtype=torch.int32, device=q.device)
    others = seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table
    settings = *options.scores, interleaved, options.split_size, options.deterministic
    rest = *map(contiguous, others), slopes_for_op(alibi_slopes), *settings
    if op_checks_first:
        arguments = q, k_cache, v_cache, k, v, *rest
        unchecked = given, options_given
        out, softmax_lse = run_then_check("kvcache_fwd", arguments, _check, unchecked)
    else:
        head_dim = q.shape[3]
        with torch.no_grad():
            copies = padded(k_cache), padded(v_cache)
            qkv = padded(q), *copies, padded(k), padded(v)
            out, softmax_lse = run("kvcache_fwd", (*qkv, *rest), needs_dispatcher(*qkv))
            if head_dim % 8:
                out = out[..., :head_dim]
                if k is not None:
                    with _writable():
                        k_cache.copy_(copies[0][..., :head_dim])
                        v_cache.copy_(copies[1][..., :head_dim])
    if k is not None and not torch.compiler.is_compiling():
        # A backward that saved the cache has to detect the change.
        torch.autograd.graph.increment_version(k_cache)
        torch.autograd.graph.increment_version(v_cache)
    return (out, softmax_lse) if with_lse else out


def _check(
    given: tuple[Any, ...], options_given: tuple[Any, ...]
) -> tuple[int | torch.Tensor | None, Options]:
    """Checks a call, and returns the lengths before k is appended, and the options.

    Args:
        given: the tensors and cache_seqlens.
        options_given: the arguments of `resolve_options` after head_dim.
    """
    q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, *others = given
    cache_batch_idx, cache_leftpad, block_table, alibi_slopes = others
    capacity = checks.check_cache(q, k_cache, v_cache, cache_batch_idx, block_table)
    batch, _, nheads, head_dim = q.shape
    seqlen_new = checks.check_new(q, k_cache, k, v, cache_seqlens, capacity)
    seqlens = checks.check_cache_seqlens(cache_seqlens, batch, seqlen_new, capacity, q.device)
    checks.check_leftpad(cache_leftpad, block_table, batch, q.device)
    tensors.check_alibi(alibi_slopes, batch, nheads, q.device)
    options = resolve_options(head_dim, *options_given)
    checks.check_rotary(q, k, rotary_cos, rotary_sin, seqlens, capacity, options.scores)
    kernels.check_kernels(q.device, q.dtype, head_dim)
    if q.device.type == "cuda" and head_dim % 8 == 0:  # otherwise a copy is used
        checks.check_rows_aligned("k_cache", k_cache)
        checks.check_rows_aligned("v_cache", v_cache)
    derivatives.check_no_tangent((q, k_cache, v_cache, k, v))
    return seqlens, options
