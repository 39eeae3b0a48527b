"""Attention over a cache of keys and values, which the same call can append to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..checks import numbers
from ..checks.ops import length_in_cache, validate
from ..checks.tensors import capacity
from ..ops.autograd import run
from ..schemas import cache_call
from ..types import Call
from .call import WithLse, as_sink, completed, resolve_options, typed
from .descale import scaled, with_scaled_query


@typed
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
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
    return_softmax_lse: bool = False,
    *,
    split_size: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    k_descale: float | torch.Tensor | None = None,
    v_descale: float | torch.Tensor | None = None,
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
            head_dim is 1 to 256; if no multiple of 8, the cache is copied at each call. Or it is
            576, for multi-head latent attention: see v_cache.
        k_cache: (batch_cache, seqlen_cache, nheads_k, head_dim), like q, last dimension contiguous;
            with block_table (num_blocks, page_block_size, nheads_k, head_dim), where
            page_block_size is a multiple of 16. nheads is a multiple of nheads_k. batch_cache may
            be more than batch. On a CUDA device, if head_dim is a multiple of 8, rows start at
            multiples of 16 bytes: strides of dimensions larger than 1 are multiples of 8 elements.
            It may be float8_e4m3fn instead, for any float16 or bfloat16 q, rows then at multiples
            of 8 bytes: the bits are those of the call on k_cache.to(q.dtype) and
            v_cache.to(q.dtype), which holds the same numbers. Nothing can be appended then.
        v_cache: like k_cache; its head_dim_v may be another one, as in `flash_attn_func`. Where it
            is padded, the cache is copied at each call. None: multi-head latent attention (MLA,
            absorbed). q and k_cache have head_dim 576 then, float16 or bfloat16, and the values are
            the first 512 columns of k_cache; so many has out. Nothing can be appended: write new
            rows into k_cache before the call. softmax_scale None is 576 ** -0.5; a model has its
            own (DeepSeek: 192 ** -0.5, times its factor for YaRN). A row has the same bits in any
            batch, contiguous or in pages, alone or with other queries and heads; prefill of heads
            that are not absorbed (192 and 128) has others.
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
        learnable_sink: (nheads,), as in `flash_attn_func`.
        k_descale: (batch, nheads_k), (nheads_k,) or (), float32, or a number: what keys in a cache
            in float8_e4m3fn are to be multiplied by. q is multiplied instead, in float32, and
            rounded to its dtype. One number for all can be a factor of softmax_scale, where it
            rounds nothing. None: 1.
        v_descale: like k_descale, of values: out is multiplied, in float32, and rounded again.

    Returns:
        out (batch, seqlen_q, nheads, head_dim_v) in q's dtype; with return_softmax_lse the tuple of
        out and softmax_lse (batch, nheads, seqlen_q) in float32, as in `flash_attn_func`.

    Raises:
        As `flash_attn_func`, and:
        UnsupportedError: k, with a cache in float8_e4m3fn or one of multi-head latent attention.

    Source:
        flash_attn_with_kvcache of flash_attn 2.8.3 (flash_attn_interface.py); FlashAttention-2
        (Dao, 2023, arXiv 2307.08691). Rotary embedding: RoFormer (Su et al., 2021, arXiv
        2104.09864).
    """
    numbers.check_num_splits(num_splits)
    interleaved, with_lse = rotary_interleaved, return_softmax_lse
    if interleaved is not True or with_lse is not False:
        interleaved = numbers.as_flag("rotary_interleaved", rotary_interleaved)
        with_lse = numbers.as_flag("return_softmax_lse", return_softmax_lse)
    given = softmax_scale, causal, window_size, softcap, split_size
    new = q, k_cache, v_cache, k, v
    indices = cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table
    head_dim, call = prepare((*new, *indices), given, interleaved, alibi_slopes, learnable_sink)
    if k_descale is not None or v_descale is not None:
        with torch.no_grad():
            call = with_scaled_query(call, k_descale, v_descale)
    try:
        head_dim_v = 8 if v_cache is None else v_cache.shape[-1]
    except (AttributeError, IndexError, RuntimeError):
        head_dim_v = 8  # the op refuses it
    if head_dim % 8 or head_dim_v % 8:
        with torch.no_grad():
            call = completed(call, pads=True)
            out, softmax_lse = run(call)
            out = out[..., :head_dim_v]
            if k is not None and v_cache is not None:
                _, k_copy, v_copy, *_ = call[1]
                # The cache may have been made in inference mode; kernels write to it all the same.
                writes = nullcontext() if torch.compiler.is_compiling() else torch.inference_mode()
                with writes:  # no loop in here: torch.compile for Python 3.13 loses the blocks then
                    _write_back(k_cache, k_copy)
                    _write_back(v_cache, v_copy)
    else:
        out, softmax_lse = run(call)
    if k is not None and v_cache is not None and not torch.compiler.is_compiling():
        # A backward that saved the cache has to detect the change.
        torch.autograd.graph.increment_version(k_cache)
        torch.autograd.graph.increment_version(v_cache)
    if v_descale is not None:
        out = scaled(out, v_descale, call)
    return (out, softmax_lse) if with_lse else out


def _write_back(cache: torch.Tensor, copy: torch.Tensor) -> None:
    if copy is not cache:
        cache.copy_(copy[..., : cache.shape[-1]])


def prepare(
    tensors: tuple[Any, ...],
    given: tuple[Any, ...],
    rotary_interleaved: bool,
    alibi_slopes: torch.Tensor | None,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[int, Call]:
    """Returns head_dim, and the layout of a call; a wrong length raises.

    Tensors are those of `cache_call`, with a cache_seqlens that may be an int; `given` are the
    arguments of `resolve_options` after dropout_p.
    """
    head_dim, options = resolve_options(tensors[0], 0.0, *given)
    if learnable_sink is not None and isinstance(learnable_sink, torch.Tensor):
        learnable_sink = as_sink(learnable_sink.detach())
    call = cache_call(tensors, options, rotary_interleaved, alibi_slopes, learnable_sink)
    seqlens = tensors[5]
    if seqlens is None or isinstance(seqlens, torch.Tensor):
        return head_dim, call
    q, k_cache, _, k, v, *_, table = tensors
    # Checked here: the op does not read the tensor that is made of it.
    validate(*call)
    new = 0 if k is None or v is None else k.shape[1]
    length = length_in_cache(seqlens, capacity(k_cache, table), new)
    filled = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    tensors = *tensors[:5], filled, *tensors[6:]
    others = rotary_interleaved, alibi_slopes, learnable_sink
    return head_dim, cache_call(tensors, options, *others)
