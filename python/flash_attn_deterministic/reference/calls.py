"""The functions of the reference: dense, packed and cached calls, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..checks.tensors import cached_values
from ..types import Gradients
from .backward import KeyGradients, attend_backward, finish
from .batch import Batch, Tensors, batches
from .formats import DEFAULT_FORMATS
from .forward import attend
from .storage import places, rotated
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor | None = None,
    return_row_max: bool = False,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, ...]:
    """Computes attention in the kernels' order of operations.

    Query i has the position i + seqlen_k - seqlen_q among the keys.

    Args:
        q: (batch, seqlen_q, nheads, head_dim); float16, bfloat16, float32 or float64.
        k: (batch, seqlen_k, nheads_k, head_dim), like q; nheads is a multiple of nheads_k.
        v: like k; it may have another head_dim, which out then has.
        alibi_slopes: (nheads,) or (batch, nheads); slope times the distance between the positions
            of query and key is subtracted from the score.
        return_row_max: whether to return row_max too.
        softmax_scale: factor of q k^T; None: head_dim ** -0.5.
        causal: whether a query sees no key after its position; as a right window of 0.
        window: how many keys before and after its position a query sees; negative: all.
        softcap: where positive, scores are softcap * tanh(scores / softcap).
        dropout_p: probability that a weight is dropped; the others are divided by 1 - dropout_p.
        rng_state: (2,), int64: seed and offset of the dropout mask; or (batch, 1), a seed of each
            sequence, whose mask then does not depend on its index in the batch.
        split_size: tokens per split, a multiple of block_n; 0: one split. Of the forward.
        block_n: keys per block, a power of two; None: that of the kernels.
        formats: number format of each step.
        learnable_sink: (nheads,), one more score of each row, without a value, that is not scaled.

    Returns:
        out (batch, seqlen_q, nheads, head_dim) in q's dtype, and softmax_lse (batch, nheads,
        seqlen_q) in float32 (float64 for float64 inputs). Rows without a visible key: out 0,
        softmax_lse +inf, or the sink. If asked for, row_max, like softmax_lse: the largest score of
        each row as it enters the softmax, scaled and capped, with ALiBi, without the sink; -inf
        without a visible key.

    Raises:
        DtypeError: q has another dtype.
        ArgumentError: split_size or block_n is not as above.
    """
    walk = Walk.of(q, **options)
    results = attend(Batch(walk, q, k, v, alibi_slopes, list(range(q.shape[0]))))
    return results if return_row_max else results[:2]


@torch.no_grad()
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_row_max: bool = False,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, ...]:
    """Computes attention over packed sequences, each the same bits as alone in `attention`.

    Arguments are those of `flash_attn_varlen_func` and of `attention`. max_seqlen_q and
    max_seqlen_k have no effect: every sequence is computed to its end. Lengths are not checked. A
    sequence's dropout mask depends on its index in the batch, or on its own seed. Pages in
    float8_e4m3fn are converted to q's dtype, which changes no number.

    Returns:
        out (total_q, nheads, head_dim) and softmax_lse (nheads, total_q), otherwise as in
        `attention`. Rows that belong to no sequence: out 0, softmax_lse +inf, row_max -inf.
    """
    walk = Walk.of(q, **options)
    rows, spans = _spans(cu_seqlens_q), _spans(cu_seqlens_k)
    skipped = [0] * len(rows) if leftpad_k is None else leftpad_k.tolist()
    ends = [span.stop - span.start for span in spans] if seqused_k is None else seqused_k.tolist()

    def keys(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        if block_table is None:
            first = spans[sequence].start
            tokens = slice(first + skipped[sequence], first + ends[sequence])
            return k[tokens], v[tokens]
        index = places(block_table[sequence], 0, ends[sequence], k.shape[1])
        return k[index].to(q.dtype), v[index].to(q.dtype)

    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    softmax_lse = q.new_full((q.shape[1], q.shape[0]), float("inf"), dtype=walk.dtype)
    row_max = -softmax_lse
    lengths = [(s.stop - s.start, end - n) for s, end, n in zip(rows, ends, skipped, strict=True)]
    for batch, _ in batches(walk, lengths, lambda b: (q[rows[b]],), keys, alibi_slopes):
        for b, *results in zip(batch.sequences, *attend(batch), strict=True):
            out[rows[b]], softmax_lse[:, rows[b]], row_max[:, rows[b]] = results
    return (out, softmax_lse, row_max) if return_row_max else (out, softmax_lse)


def _spans(cu_seqlens: torch.Tensor) -> list[slice]:
    return list(itertools.starmap(slice, itertools.pairwise(cu_seqlens.tolist())))


@torch.no_grad()
def kvcache_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends k and v to the caches in place, and computes attention over the caches.

    Arguments are those of `flash_attn_with_kvcache` and of `attention`; lengths, rows and pages are
    not checked. Caches in float8_e4m3fn are converted to q's dtype, which changes no number. New
    key j of sequence b is written to, and rotated at, position cache_seqlens[b] + j. Query i is
    rotated at cache_seqlens[b] + i with causal or a window, otherwise at cache_seqlens[b]. Position
    0 of splits and masks is the first token after cache_leftpad; for rotary that counts.
    """
    walk = Walk.of(q, **options)
    v_cache = cached_values(k_cache, v_cache)
    batch_size, seqlen_q = q.shape[:2]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    homes: Any = range(batch_size) if cache_batch_idx is None else cache_batch_idx.tolist()
    if block_table is not None:
        homes = block_table
    skipped = [0] * batch_size if cache_leftpad is None else cache_leftpad.tolist()
    if isinstance(cache_seqlens, torch.Tensor):
        used = cache_seqlens.tolist()
    else:
        used = [capacity if cache_seqlens is None else cache_seqlens] * batch_size
    ends = [end + (0 if k is None else k.shape[1]) for end in used]

    def turned(x: torch.Tensor, sequence: int, advance: bool) -> torch.Tensor:
        if rotary_cos is None or rotary_sin is None:
            return x[sequence]
        position = used[sequence]
        return rotated(x[sequence], rotary_cos, rotary_sin, position, rotary_interleaved, advance)

    if k is not None and v is not None:
        # As the kernels do, this writes to a cache made in inference mode.
        with torch.inference_mode():
            for b in range(batch_size):
                index = places(homes[b], used[b], ends[b], k_cache.shape[1])
                k_cache[index], v_cache[index] = turned(k, b, True), v[b]

    def keys(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = places(homes[sequence], skipped[sequence], ends[sequence], k_cache.shape[1])
        return k_cache[index].to(q.dtype), v_cache[index].to(q.dtype)

    def rows(sequence: int) -> tuple[torch.Tensor]:
        return (turned(q, sequence, walk.window.is_local),)

    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    softmax_lse = q.new_full((batch_size, q.shape[2], seqlen_q), float("inf"), dtype=walk.dtype)
    lengths = [(seqlen_q, end - n) for end, n in zip(ends, skipped, strict=True)]
    for batch, _ in batches(walk, lengths, rows, keys, alibi_slopes):
        out[batch.sequences], softmax_lse[batch.sequences], _ = attend(batch)
    return out, softmax_lse


@torch.no_grad()
def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Computes the gradients of `attention` with respect to q, k and v.

    Args:
        dout: the gradient of out, like it.
        q: as in `attention`; so are k, v, alibi_slopes and the options, of which split_size and
            block_n change no bit.
        out: as `attention` returned it; softmax_lse too.
        dlse: the gradient of softmax_lse, like it; None: 0.

    Returns:
        dq, dk and dv, like q, k and v. Rows without a visible key, and keys that no row sees: 0.

    Raises:
        As `attention`.
    """
    batch = Batch(Walk.of(q, **options), q, k, v, alibi_slopes, list(range(q.shape[0])))
    dlse = torch.zeros_like(softmax_lse) if dlse is None else dlse
    return attend_backward(batch, (dout, out, softmax_lse, dlse))


@torch.no_grad()
def varlen_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    unrounded: bool = False,
    **options: Unpack[Options],
) -> Gradients:
    """Computes the gradients of `varlen_attention`, each sequence the same bits as alone.

    Arguments are those of `attention_backward` and `varlen_attention`. With `unrounded` dk is
    without softmax_scale, and dk and dv are in the computing dtype: what `finish_key_sums` takes,
    for some of the rows or for all.

    Returns:
        dq, dk and dv, like q, k and v; 0 for tokens of no sequence.
    """
    walk = Walk.of(q, **options)
    rows, keys = _spans(cu_seqlens_q), _spans(cu_seqlens_k)
    dlse = torch.zeros_like(softmax_lse) if dlse is None else dlse
    dq = q.new_zeros(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=walk.dtype if unrounded else x.dtype) for x in (k, v))

    def of_rows(b: int) -> tuple[torch.Tensor, ...]:
        own = rows[b]
        return q[own], dout[own], out[own], softmax_lse[:, own], dlse[:, own]

    lengths = [(r.stop - r.start, s.stop - s.start) for r, s in zip(rows, keys, strict=True)]
    for batch, others in batches(
        walk, lengths, of_rows, lambda b: (k[keys[b]], v[keys[b]]), alibi_slopes
    ):
        gradients = attend_backward(batch, others, unrounded)
        for b, *results in zip(batch.sequences, *gradients, strict=True):
            dq[rows[b]], dk[keys[b]], dv[keys[b]] = results
    return dq, dk, dv


def finish_key_sums(sums: KeyGradients, k: torch.Tensor, softmax_scale: float) -> KeyGradients:
    """Turns the sums over all rows, of `varlen_attention_backward`, into dk and dv like them.

    They may be for any keys; k has the dtype of the gradients.
    """
    return finish(Walk.of(k, softmax_scale=softmax_scale), sums, k.dtype)


def with_residual(
    attention: Callable[..., Tensors], q: torch.Tensor, *tensors: torch.Tensor, **options: Any
) -> Tensors:
    """Computes attention, dense or packed, and the rounding error of out.

    The backward subtracts D, the sum of dout * out over a row, from numbers that are close to D
    where keys are alike: rounding out to 16 bit then costs dq most of its digits.

    Returns:
        What that returns, bit for bit, and the residual: unrounded out minus out, shaped
        like it, in bfloat16.
    """
    # With q in float32, out is not rounded; all other steps round as for q's dtype.
    options["formats"] = options.get("formats", DEFAULT_FORMATS).filled(q.dtype)
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    exact, *others = attention(wide, *tensors, **options)
    out = exact.to(q.dtype)
    out.masked_fill_(out.isnan(), float("nan"))
    return out, *others, (exact - out).to(torch.bfloat16)


def restored(out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns out for the backward: in float32 with its residual, if there is one."""
    return out if residual is None else out.float() + residual
