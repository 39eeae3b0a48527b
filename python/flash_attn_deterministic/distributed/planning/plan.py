"""The keys that a rank's rows need, the rows that its keys need, and the calls on both.

A row has the bits of one device if it sees the same keys at the same positions relative to splits
and blocks of keys, which begin at position 0 of the sequence. So the keys of a call begin at a
multiple of both; keys that no row sees are zeros and are not sent. The first row of a call changes
no row's bits, and the first key changes no bit of dk and dv as long as all rows that see a key are
there: see ADR 17.

A call aligns its masks to its last row and its last key. If these do not belong together in the
whole sequence, both sides of the call's window are moved by the difference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .layout import Layout, Piece, Tokens

# A multiple of the keys per block of every kernel, forward and backward.
KEY_BLOCK = 128
# A multiple of the rows per block of every backward kernel.
ROW_BLOCK = 128


class Mask(NamedTuple):
    """A row sees keys from `left` before to `right` after its position; -1: no limit."""

    left: int
    right: int

    def keys(self, begin: int, end: int, offset: int, seqlen_k: int) -> tuple[int, int]:
        """Returns the keys [begin, end) that rows [begin, end) see; begin == end if none.

        Args:
            begin: first row.
            end: row after the last.
            offset: seqlen_k - seqlen_q, the position of row 0 among the keys.
            seqlen_k: length of the sequence.
        """
        last = seqlen_k if self.right < 0 else min(max(end + offset + self.right, 0), seqlen_k)
        first = 0 if self.left < 0 else min(max(begin + offset - self.left, 0), last)
        return first, last

    def rows(self, begin: int, end: int, offset: int, seqlen_q: int) -> tuple[int, int]:
        """Returns the rows that see keys [begin, end), as `keys` does."""
        last = seqlen_q if self.left < 0 else min(max(end - offset + self.left, 0), seqlen_q)
        first = 0 if self.right < 0 else min(max(begin - offset - self.right, 0), last)
        return first, last

    def moved(self, keys: int) -> Mask:
        """Returns the mask of a call whose last key is `keys` after the last row's position."""
        return Mask(
            self.left if self.left < 0 else self.left + keys,
            self.right if self.right < 0 else self.right - keys,
        )


class Call(NamedTuple):
    """One call of a packed op.

    Args:
        rows: in the tensor of rows.
        keys: in the tensor of keys.
        starts_q: values of cu_seqlens_q.
        starts_k: values of cu_seqlens_k.
        mask: of the call.
    """

    rows: slice
    keys: slice
    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    mask: Mask

    @property
    def longest(self) -> tuple[int, int]:
        """Returns max_seqlen_q and max_seqlen_k."""
        q, k = (
            max(b - a for a, b in itertools.pairwise(starts))
            for starts in (self.starts_q, self.starts_k)
        )
        return q, k


class Part(NamedTuple):
    """A piece of rows with all keys that they see, or of keys with all rows that see them.

    Args:
        rows: of a sequence.
        keys: of the same sequence.
        mask: of a call on both.
    """

    rows: Piece
    keys: Piece
    mask: Mask


class Half(NamedTuple):
    """Own rows on gathered keys, or own keys on gathered rows.

    Args:
        wanted: the pieces that each rank gathers.
        room: gathered tokens of this rank, gaps included.
        parts: of this rank, one for each of its own pieces.
        calls: the parts as calls.
    """

    wanted: Layout
    room: int
    parts: tuple[Part, ...]
    calls: tuple[Call, ...]


class Divided(NamedTuple):
    """The sequences that are entirely on one rank, and the others.

    Args:
        calls: of the whole sequences of this rank, on its own tensors.
        q: layout of the others; lengths are of all.
        k: likewise.
        travels: whether there are others, on any rank.
    """

    calls: tuple[Call, ...]
    q: Tokens
    k: Tokens
    travels: bool


@functools.lru_cache(maxsize=64)
def divided(q: Tokens, k: Tokens, mask: Mask, rank: int) -> Divided:
    """Separates the sequences that are entirely on one rank from the others."""
    whole: dict[int, tuple[int, Part]] = {}
    for number, (own_q, own_k) in enumerate(zip(q.layout, k.layout, strict=True)):
        rows = {piece.sequence: piece for piece in own_q if _is_whole(piece, q)}
        for piece in own_k:
            if _is_whole(piece, k) and piece.sequence in rows:
                whole[piece.sequence] = number, Part(rows[piece.sequence], piece, mask)
    calls = _calls([part for number, part in whole.values() if number == rank])
    q, k = (
        Tokens(
            tokens.lengths,
            tuple(tuple(p for p in own if p.sequence not in whole) for own in tokens.layout),
        )
        for tokens in (q, k)
    )
    return Divided(calls, q, k, travels=any((*q.layout, *k.layout)))


def _is_whole(piece: Piece, tokens: Tokens) -> bool:
    return (piece.begin, piece.end) == (0, tokens.lengths[piece.sequence])


# For a piece: the first token of the call, and the tokens [begin, end) that it needs.
Needed = Callable[[Piece], tuple[int, int, int]]


@functools.lru_cache(maxsize=64)
def rows_on_keys(q: Tokens, k: Tokens, mask: Mask, align: int, rank: int) -> Half:
    """Plans own rows on the keys that they see: the forward, dq, and the steps of a chain.

    Args:
        q: tokens of q.
        k: tokens of k and v.
        mask: of the whole sequences.
        align: the keys of a call begin at multiples of this.
        rank: of the plan.
    """

    def needed(rows: Piece) -> tuple[int, int, int]:
        seqlen_k = k.lengths[rows.sequence]
        begin, end = mask.keys(rows.begin, rows.end, _offset(q, k, rows), seqlen_k)
        return begin // align * align, begin, end

    wanted, room, places = _gathered(q.layout, needed, rank)
    parts = [
        Part(rows, keys, _moved(mask, rows, keys, _offset(q, k, rows)))
        for rows, keys in zip(q.layout[rank], places, strict=True)
    ]
    return Half(wanted, room, tuple(parts), _calls(parts))


@functools.lru_cache(maxsize=64)
def keys_under_rows(q: Tokens, k: Tokens, mask: Mask, align: int, rank: int) -> Half:
    """Plans own keys under the rows that see them: dk and dv without a chain.

    Args:
        q: as in `rows_on_keys`.
        k: as in `rows_on_keys`.
        mask: as in `rows_on_keys`.
        align: the rows of a call begin at multiples of this.
        rank: of the plan.
    """

    def needed(keys: Piece) -> tuple[int, int, int]:
        seqlen_q = q.lengths[keys.sequence]
        begin, end = mask.rows(keys.begin, keys.end, _offset(q, k, keys), seqlen_q)
        return begin // align * align, begin, end

    wanted, room, places = _gathered(k.layout, needed, rank)
    parts = [
        Part(rows, keys, _moved(mask, rows, keys, _offset(q, k, keys)))
        for rows, keys in zip(places, k.layout[rank], strict=True)
    ]
    return Half(wanted, room, tuple(parts), _calls(parts))


def _offset(q: Tokens, k: Tokens, piece: Piece) -> int:
    return k.lengths[piece.sequence] - q.lengths[piece.sequence]


def _moved(mask: Mask, rows: Piece, keys: Piece, offset: int) -> Mask:
    if rows.begin == rows.end or keys.begin == keys.end:
        return mask  # nothing is seen
    return mask.moved(keys.end - (rows.end + offset))


def _gathered(layout: Layout, needed: Needed, rank: int) -> tuple[Layout, int, tuple[Piece, ...]]:
    """Finds the tokens that each rank gathers for its pieces, and their places.

    Pieces that need overlapping tokens share them.

    Returns:
        The pieces that each rank gathers; the number of gathered tokens of `rank`, gaps included;
        and the tokens that each piece of `rank` needs, with their place among these.
    """
    wanted = []
    for number, own in enumerate(layout):
        spans = sorted((piece.sequence, *needed(piece)) for piece in own)
        merged: list[tuple[int, int, int, int]] = []
        for sequence, first, begin, end in spans:
            if begin == end:
                continue
            last = merged[-1] if merged else None
            if last is not None and last[0] == sequence and first <= last[3]:
                merged[-1] = (sequence, last[1], min(last[2], begin), max(last[3], end))
            else:
                merged.append((sequence, first, begin, end))
        room = 0
        gathered: list[Piece] = []
        shared: dict[int, list[Piece]] = {}
        for sequence, first, begin, end in merged:
            gathered.append(Piece(sequence, begin, end, room + begin - first))
            shared.setdefault(sequence, []).append(Piece(sequence, first, end, room))
            room += end - first
        wanted.append(tuple(gathered))
        if number == rank:
            places = tuple(_within(piece.sequence, needed(piece), shared) for piece in own)
            own_room = room
    return tuple(wanted), own_room, places


def _within(sequence: int, needed: tuple[int, int, int], shared: dict[int, list[Piece]]) -> Piece:
    first, begin, end = needed
    for holder in shared.get(sequence, ()):
        if begin < end and holder.begin <= first and end <= holder.end:
            return Piece(sequence, first, end, holder.at + first - holder.begin)
    return Piece(sequence, begin, begin, 0)


def call_of(part: Part) -> Call | None:
    """Returns a part as a call of its own; None where it has no rows or no keys."""
    calls = _calls([part])
    return calls[0] if calls else None


def _calls(parts: Sequence[Part]) -> tuple[Call, ...]:
    """Makes calls of parts; neighbours with the same mask share a call.

    Parts without rows or keys need no call: their results are 0 (+inf for softmax_lse).
    """
    calls: list[Call] = []
    for part in parts:
        rows, keys = part.rows.stored, part.keys.stored
        length_q, length_k = rows.stop - rows.start, keys.stop - keys.start
        if length_q == 0 or length_k == 0:
            continue
        last = calls[-1] if calls else None
        if last is not None and (last.rows.stop, last.keys.stop, last.mask) == (
            rows.start,
            keys.start,
            part.mask,
        ):
            calls[-1] = Call(
                slice(last.rows.start, rows.stop),
                slice(last.keys.start, keys.stop),
                (*last.starts_q, last.starts_q[-1] + length_q),
                (*last.starts_k, last.starts_k[-1] + length_k),
                part.mask,
            )
        else:
            calls.append(Call(rows, keys, (0, length_q), (0, length_k), part.mask))
    return tuple(calls)
