"""Attention over sequences of different lengths: packed, paged, in a cache."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .dense import attend, batch_slopes
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over packed sequences, each the same bits as alone in `attention`.

    Arguments are those of `flash_attn_varlen_func` and of `attention`. max_seqlen_q and
    max_seqlen_k have no effect: every sequence is computed to its end. Lengths are not checked. A
    sequence's dropout mask depends on its index in the batch.

    Returns:
        out (total_q, nheads, head_dim) and softmax_lse (nheads, total_q), otherwise as in
        `attention`. Rows that belong to no sequence: out 0, softmax_lse +inf.
    """
    walk = Walk.of(q, **options)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    seqlens_q = [end - begin for begin, end in itertools.pairwise(q_starts)]
    batch = len(seqlens_q)
    skipped = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    if seqused_k is None:
        ends = [end - begin for begin, end in itertools.pairwise(k_starts)]
    else:
        ends = seqused_k.tolist()
    seqlens_k = [end - begin for begin, end in zip(skipped, ends, strict=True)]
    slots = None if block_table is None else Slots(k.shape[1], block_table=block_table)

    def keys(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        if slots is None:
            begin = k_starts[sequence] + skipped[sequence]
            tokens = slice(begin, begin + seqlens_k[sequence])
            return k[tokens], v[tokens]
        index = slots(sequence, 0, seqlens_k[sequence])
        return k[index], v[index]

    def rows(sequence: int) -> torch.Tensor:
        return q[q_starts[sequence] : q_starts[sequence + 1]]

    out = q.new_zeros(q.shape)
    softmax_lse = q.new_full((q.shape[1], q.shape[0]), float("inf"), dtype=walk.dtype)
    lengths = list(zip(seqlens_q, seqlens_k, strict=True))
    slopes = batch_slopes(alibi_slopes, batch)
    for sequence, out_rows, lse_rows in attend_sequences(walk, lengths, rows, keys, slopes):
        packed = slice(q_starts[sequence], q_starts[sequence + 1])
        out[packed], softmax_lse[:, packed] = out_rows, lse_rows
    return out, softmax_lse


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

    Arguments are those of `flash_attn_with_kvcache` and of `attention`; lengths, rows and pages are
    not checked. New key j of sequence b is written to, and rotated at, position cache_seqlens[b] +
    j. Query i is rotated at cache_seqlens[b] + i with causal or a window, otherwise at
    cache_seqlens[b]. Position 0 of splits and masks is the first token after cache_leftpad; for
    rotary that counts.
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


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotates pairs of the first elements of each row, in float32, rounded to x's dtype.

    x is (seqlen, nheads, head_dim), cos and sin (seqlen, rotary_dim / 2). Pairs are interleaved,
    (0, 1), (2, 3) and so on, or (0, rotary_dim / 2), (1, rotary_dim / 2 + 1) and so on.
    """
    half = cos.shape[1]
    left = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    right = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    real, imaginary = x[..., left].to(dtype), x[..., right].to(dtype)
    rotated = x.clone()
    rotated[..., left] = (real * cos - imaginary * sin).to(x.dtype)
    rotated[..., right] = (real * sin + imaginary * cos).to(x.dtype)
    return rotated


@dataclass(frozen=True)
class Slots:
    """The places of a sequence's tokens in buffers of shape (rows, tokens, nheads_k, head_dim).

    A sequence has one row of them, or with a block table (batch, pages) several, in order.
    """

    tokens: int
    rows: Sequence[int] = ()
    block_table: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.tokens * (1 if self.block_table is None else self.block_table.shape[1])

    def __call__(self, sequence: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns row and place of the tokens [begin, end), as indices into the buffer."""
        token = torch.arange(begin, end, device="cpu")
        if self.block_table is None:
            return torch.full_like(token, self.rows[sequence]), token
        page = torch.div(token, self.tokens, rounding_mode="floor")
        return self.block_table[sequence].long().cpu()[page], token % self.tokens


def attend_sequences(
    walk: Walk,
    seqlens: Sequence[tuple[int, int]],
    rows: Callable[[int], torch.Tensor],
    keys: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    slopes: torch.Tensor | None,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields each sequence's index, out (seqlen_q, nheads, head_dim) and lse (nheads, seqlen_q).

    Sequences of equal length are computed together; bits don't depend on that. `rows` and `keys`
    map a sequence to its queries, and to its keys and values in use.
    """
    alike = defaultdict(list)
    for sequence, lengths in enumerate(seqlens):
        alike[lengths].append(sequence)
    for (seqlen_q, _), sequences in alike.items():
        if seqlen_q == 0:
            continue
        k, v = zip(*map(keys, sequences), strict=True)
        out, softmax_lse = attend(
            walk,
            torch.stack([rows(sequence) for sequence in sequences]),
            torch.stack(k),
            torch.stack(v),
            None if slopes is None else slopes[sequences],
            sequences,
        )
        yield from zip(sequences, out, softmax_lse, strict=True)
