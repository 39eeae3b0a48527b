"""Sequences of equal lengths, and the tiles that a walk over their rows is cut into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from .. import tree
from . import ieee
from .dropout import keep_mask
from .formats import round_to
from .walk import Walk, add_products, copy

# Elements of the largest tensor of a step. Up to this size it stays in the L2 cache, and torch runs
# an operation on the calling thread: the thread pool gains little on such steps, and on a busy
# machine its barriers can make them a hundred times slower.
_TILE_ELEMENTS = 32 * 1024
_MAX_TILE_ROWS = 128

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Tile:
    """Rows of some sequences and heads, with their keys and values.

    Tensors of rows are (batch, nheads_k, group, rows, n): a group of heads shares its keys.
    """

    walk: Walk
    batch: slice  # of the sequences of the batch
    heads_k: slice
    heads: slice  # of queries
    rows: slice  # of the queries of a sequence
    k: torch.Tensor  # (batch, seqlen_k, nheads_k, head_dim)
    v: torch.Tensor
    slopes: torch.Tensor | None  # (batch, nheads_k, group, 1, 1), for scores that are scaled later
    positions: range  # of the rows among the keys
    sequences: list[int]  # their indices in the call

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns a tile of what `Batch.grouped` returned, in the computing dtype."""
        part = rows[self.batch, self.heads_k, :, self.rows]
        return part.to(self.walk.dtype, memory_format=torch.contiguous_format)

    def scores(
        self, q: torch.Tensor, keys: range
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Returns scores to be multiplied by `scale`, and with softcap the value of tanh.

        The third result is the block of keys, (batch, nheads_k, head_dim, keys).
        """
        walk = self.walk
        k = copy(self.k[:, keys.start : keys.stop].permute(0, 2, 3, 1), walk.dtype)
        scores = q.new_zeros(q.shape[:-1] + k.shape[-1:])
        add_products(scores, q, k[:, :, None])
        scores = round_to(scores, walk.formats.scores)
        capped = None
        if walk.softcap > 0:
            scores = capped = ieee.tanh(scores * walk.tanh_scale)
        if self.slopes is not None:
            row = torch.arange(self.positions.start, self.positions.stop, device=q.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=q.device)
            scores = scores - self.slopes * (row - key).abs().to(walk.dtype)
        return scores, capped, k

    def hidden(self, keys: range) -> torch.Tensor | None:
        """Returns (rows, keys), True where the row does not see the key; None if none is hidden."""
        return self.walk.window.hidden(self.positions, keys, self.k.device)

    def kept(self, keys: range) -> torch.Tensor | None:
        """Returns where dropout keeps a weight; None without dropout."""
        state = self.walk.rng_state
        if state is None or not self.walk.dropout_p:
            return None
        heads = torch.arange(self.heads.start, self.heads.stop, device=state.device)
        sequences = torch.tensor(self.sequences, device=state.device)
        spans = (self.rows.start, self.rows.stop), (keys.start, keys.stop)
        mask = keep_mask(state, self.walk.dropout_p, sequences, heads, *spans)
        group = len(heads) // self.k.shape[2]
        return mask.reshape(mask.shape[0], self.k.shape[2], group, *mask.shape[2:])


@dataclass(frozen=True)
class Batch:
    """Sequences of equal lengths, whose tensors are as in `attention`."""

    walk: Walk
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None  # (nheads,) or (batch, nheads)
    sequences: list[int]  # their indices in the call

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (batch, rows, nheads, n) as (batch, nheads_k, group, rows, n)."""
        nheads_k = self.k.shape[2]
        shape = (*rows.shape[:2], nheads_k, rows.shape[2] // nheads_k, rows.shape[3])
        return rows.reshape(shape).permute(0, 2, 3, 1, 4)

    def tiles(self) -> Iterator[Tile]:
        """Yields tiles that cover q, cut where chunks begin; bits don't depend on the rest."""
        (batch, seqlen_q, nheads, head_dim), (seqlen_k, nheads_k) = self.q.shape, self.k.shape[1:3]
        group = nheads // nheads_k
        row_elements = group * max(self.walk.block_n, head_dim)
        most = max(1, min(seqlen_q, _MAX_TILE_ROWS, _TILE_ELEMENTS // row_elements))
        pairs = max(1, _TILE_ELEMENTS // (most * row_elements))
        slopes = self.slopes
        if slopes is not None:
            slopes = slopes.to(self.walk.dtype).expand(batch, nheads) / self.walk.scale
            slopes = slopes.reshape(batch, nheads_k, group, 1, 1)
        for own in _cut(batch, max(1, pairs // nheads_k)):
            for heads_k in _cut(nheads_k, pairs):
                for rows in _cut(seqlen_q, most, tree.CHUNK_ROWS):
                    position = rows.start + seqlen_k - seqlen_q
                    yield Tile(
                        self.walk,
                        own,
                        heads_k,
                        slice(heads_k.start * group, heads_k.stop * group),
                        rows,
                        self.k[own, :, heads_k],
                        self.v[own, :, heads_k],
                        None if slopes is None else slopes[own, heads_k],
                        range(position, position + rows.stop - rows.start),
                        self.sequences[own],
                    )


def _cut(length: int, most: int, border: int = 1 << 62) -> Iterator[slice]:
    """Yields parts of a range, which end at multiples of `border`."""
    begin = 0
    while begin < length:
        end = min(begin + most, length, (begin // border + 1) * border)
        yield slice(begin, end)
        begin = end


def batches(
    walk: Walk,
    lengths: Iterable[tuple[int, int]],
    rows: Callable[[int], Tensors],
    keys: Callable[[int], Tensors],
    slopes: torch.Tensor | None,
) -> Iterator[tuple[Batch, list[torch.Tensor]]]:
    """Puts sequences of equal lengths together; bits don't depend on that.

    Args:
        walk: of the call.
        lengths: (seqlen_q, seqlen_k) of each sequence; those without queries are left out.
        rows: maps a sequence to its queries and to other tensors.
        keys: maps a sequence to its keys and values in use.
        slopes: (nheads,) or (batch, nheads).

    Yields:
        A batch, and the other tensors of its sequences.
    """
    alike = defaultdict(list)
    for sequence, both in enumerate(lengths):
        alike[both].append(sequence)
    for (seqlen_q, _), sequences in alike.items():
        if seqlen_q == 0:
            continue
        q, *others = map(torch.stack, zip(*map(rows, sequences), strict=True))
        k, v = map(torch.stack, zip(*map(keys, sequences), strict=True))
        own = slopes[sequences] if slopes is not None and slopes.dim() == 2 else slopes
        yield Batch(walk, q, k, v, own, sequences), others
