"""Attention over a KV cache, after appending new keys and values to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .dense import batch_slopes
from .rotary import rotate
from .sequences import Slots, attend_sequences
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def kvcache_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
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

    New key j of sequence b is written to, and rotated at, position cache_seqlens[b] + j. Query i is
    rotated at cache_seqlens[b] + i with causal or a window, otherwise at cache_seqlens[b].

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        k_cache: (rows, capacity, nheads_k, head_dim); with block_table (num_pages, page_size,
            nheads_k, head_dim).
        v_cache: like k_cache.
        k: (batch, seqlen_new, nheads_k, head_dim), the keys to append; needs cache_seqlens.
        v: like k.
        rotary_cos: (seqlen_rotary, rotary_dim / 2), by position; needs k.
        rotary_sin: like rotary_cos.
        cache_seqlens: the tokens in use before the call, of all sequences or (batch,); None: the
            whole capacity. The rest is not read.
        cache_batch_idx: (batch,), each sequence's row of the caches; None: 0, 1, 2 and so on.
        cache_leftpad: (batch,), the tokens to skip at the beginning of each sequence. Position 0
            of splits and masks is the first token after them; for rotary they count.
        block_table: (batch, max_pages), the pages of each sequence.
        rotary_interleaved: whether pairs are (0, 1), (2, 3) and so on, rather than
            (0, rotary_dim / 2), (1, rotary_dim / 2 + 1) and so on.
        alibi_slopes: as in `attention`.
        **options: as in `attention`.

    Returns:
        As `attention`.

    Raises:
        DtypeError: as in `attention`.
        ArgumentError: as in `attention`. Lengths, rows and pages are not checked; see
            `checks.values`.
    """
    walk = Walk.of(q, **options)
    batch, seqlen_q = q.shape[:2]
    cache_rows = range(batch) if cache_batch_idx is None else cache_batch_idx.tolist()
    slots = Slots(k_cache.shape[1], cache_rows, block_table)
    skipped = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    used = _used(cache_seqlens, batch, slots.capacity)
    new = 0 if k is None else k.shape[1]
    ends = [end + new for end in used]
    if k is not None and v is not None:
        # As the kernels do, this writes to a cache made in inference mode.
        with torch.inference_mode():
            for b in range(batch):
                index = slots(b, used[b], ends[b])
                k_cache[index] = _rotated(
                    k[b], rotary_cos, rotary_sin, used[b], rotary_interleaved, advance=True
                )
                v_cache[index] = v[b]

    def rows(sequence: int) -> torch.Tensor:
        return _rotated(
            q[sequence],
            rotary_cos,
            rotary_sin,
            used[sequence],
            rotary_interleaved,
            advance=walk.window.is_local,
        )

    def keys(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = slots(sequence, skipped[sequence], ends[sequence])
        return k_cache[index], v_cache[index]

    out = q.new_zeros(q.shape)
    softmax_lse = q.new_full((batch, q.shape[2], seqlen_q), float("inf"), dtype=walk.dtype)
    lengths = [(seqlen_q, ends[b] - skipped[b]) for b in range(batch)]
    slopes = batch_slopes(alibi_slopes, batch)
    for sequence, out_rows, lse_rows in attend_sequences(walk, lengths, rows, keys, slopes):
        out[sequence], softmax_lse[sequence] = out_rows, lse_rows
    return out, softmax_lse


def _used(cache_seqlens: int | torch.Tensor | None, batch: int, capacity: int) -> list[int]:
    if cache_seqlens is None:
        return [capacity] * batch
    if isinstance(cache_seqlens, int):
        return [cache_seqlens] * batch
    return [int(length) for length in cache_seqlens.tolist()]


def _rotated(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    position: int,
    interleaved: bool,
    *,
    advance: bool,
) -> torch.Tensor:
    """Rotates the rows of x at `position`, with `advance` at position, position + 1 and so on."""
    if cos is None or sin is None:
        return x
    positions = torch.full((x.shape[0],), position, device=cos.device)
    if advance:
        positions += torch.arange(x.shape[0], device=cos.device)
    return rotate(x, cos[positions], sin[positions], interleaved)
