"""Layouts: the tokens of each sequence on each rank, in their order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...checks.describe import shown, type_name
from ...errors import ArgumentError, ArgumentTypeError

CONTIGUOUS = "contiguous"
ZIGZAG = "zigzag"
ORDERS = (CONTIGUOUS, ZIGZAG)


def check_order(order: Any) -> str:
    """Returns the argument `order`.

    Raises:
        ArgumentError: it is none of ORDERS; ArgumentTypeError: it is no str.
    """
    if not isinstance(order, str):
        raise ArgumentTypeError(f"order: expected a str, got {type_name(order)}")
    if order not in ORDERS:
        raise ArgumentError(f"order: expected one of {', '.join(ORDERS)}, got {shown(order)}")
    return order


class Piece(NamedTuple):
    """Tokens [begin, end) of a sequence, stored one after another from index `at`.

    Args:
        sequence: index of the sequence.
        begin: position in the sequence, from 0.
        end: likewise.
        at: index in the tensor that holds the piece.
    """

    sequence: int
    begin: int
    end: int
    at: int

    @property
    def stored(self) -> slice:
        """Returns the place of the piece in its tensor."""
        return slice(self.at, self.at + self.end - self.begin)


# The pieces of each rank, in the order in which they are stored.
Layout = tuple[tuple[Piece, ...], ...]


class Tokens(NamedTuple):
    """All tokens of q, or of k and v.

    Args:
        lengths: of each sequence.
        layout: of the tokens.
    """

    lengths: tuple[int, ...]
    layout: Layout


@functools.lru_cache(maxsize=64)
def dense_tokens(batch: int, seqlen: int, ranks: int, order: str) -> Tokens:
    """Lays out sequences of one length, each of them cut over all ranks.

    Args:
        batch: number of sequences.
        seqlen: tokens of a sequence on each rank.
        ranks: number of ranks.
        order: "contiguous": rank r holds the r-th of P parts; "zigzag": it holds the r-th and the
            r-th from the end of 2 P parts, so that all ranks have the same work under a causal
            mask.

    Raises:
        ArgumentError: seqlen is odd, and the order is zigzag.
    """
    if order == ZIGZAG and seqlen % 2:
        raise ArgumentError(
            f"q: expected an even number of tokens on each rank with order='zigzag', got {seqlen}"
        )
    cuts = [_cuts(seqlen * ranks, rank, ranks, order) for rank in range(ranks)]
    layout = tuple(
        _stored((sequence, *cut) for sequence in range(batch) for cut in own) for own in cuts
    )
    return Tokens((seqlen * ranks,) * batch, layout)


@functools.lru_cache(maxsize=64)
def packed_tokens(starts: tuple[int, ...], total: int, ranks: int, order: str, name: str) -> Tokens:
    """Lays out packed sequences.

    Args:
        starts: the values of cu_seqlens: where each sequence begins in all tokens, and the last
            end.
        total: tokens on each rank.
        ranks: number of ranks.
        order: "contiguous": rank r holds the r-th of P parts of all tokens, whatever sequences they
            belong to; "zigzag": of each sequence it holds the r-th and the r-th from the end of 2 P
            parts.
        name: of the argument with the starts, for errors.

    Raises:
        ArgumentError: starts that don't begin with 0, decrease, or don't fit the tokens; a length
            that does not divide by 2 P in the zigzag order.
    """
    pairs = list(itertools.pairwise(starts))
    if not starts or starts[0] != 0 or any(begin > end for begin, end in pairs):
        raise ArgumentError(
            f"{name}: expected a 0, then numbers that don't decrease, got {_some(starts)}"
        )
    lengths = tuple(end - begin for begin, end in pairs)
    if order == ZIGZAG:
        for sequence, length in enumerate(lengths):
            if length % (2 * ranks):
                raise ArgumentError(
                    f"{name}: expected lengths that divide by 2 * {ranks} ranks with "
                    f"order='zigzag', got {length} tokens in sequence {sequence}"
                )
    if starts[-1] > total * ranks or (order == ZIGZAG and starts[-1] != total * ranks):
        raise ArgumentError(
            f"{name}: expected {'' if order == ZIGZAG else 'at most '}{total * ranks} tokens, "
            f"{total} on each of {ranks} ranks, got {starts[-1]}"
        )
    if order == ZIGZAG:
        layout = tuple(
            _stored(
                (sequence, *cut)
                for sequence, length in enumerate(lengths)
                for cut in _cuts(length, rank, ranks, order)
            )
            for rank in range(ranks)
        )
    else:
        layout = tuple(
            _stored(
                (sequence, max(begin, rank * total) - begin, min(end, (rank + 1) * total) - begin)
                for sequence, (begin, end) in enumerate(pairs)
            )
            for rank in range(ranks)
        )
    return Tokens(lengths, layout)


@functools.lru_cache(maxsize=64)
def in_blocks(tokens: Tokens, block: int) -> Tokens:
    """Moves the borders between ranks up to multiples of `block` tokens of each sequence.

    A block is then on the rank that had its first token; most tokens stay on their rank.
    """

    if block == 1:
        return tokens

    def up(position: int, length: int) -> int:
        return min(-(-position // block) * block, length)

    layout = tuple(
        _stored(
            (
                piece.sequence,
                up(piece.begin, tokens.lengths[piece.sequence]),
                up(piece.end, tokens.lengths[piece.sequence]),
            )
            for piece in own
        )
        for own in tokens.layout
    )
    return Tokens(tokens.lengths, layout)


def stored_tokens(pieces: Sequence[Piece]) -> int:
    """Returns the number of tokens of some pieces."""
    return sum(piece.end - piece.begin for piece in pieces)


def _cuts(seqlen: int, rank: int, ranks: int, order: str) -> list[tuple[int, int]]:
    if order == CONTIGUOUS:
        part = seqlen // ranks
        return [(rank * part, (rank + 1) * part)]
    part = seqlen // (2 * ranks)
    other = 2 * ranks - 1 - rank
    return [(rank * part, (rank + 1) * part), (other * part, (other + 1) * part)]


def _stored(cuts: Iterable[tuple[int, int, int]]) -> tuple[Piece, ...]:
    """Stores cuts (sequence, begin, end) one after another; neighbours become one piece."""
    pieces: list[Piece] = []
    at = 0
    for sequence, begin, end in cuts:
        if begin >= end:
            continue
        last = pieces[-1] if pieces else None
        if last is not None and (last.sequence, last.end) == (sequence, begin):
            pieces[-1] = last._replace(end=end)
        else:
            pieces.append(Piece(sequence, begin, end, at))
        at += end - begin
    return tuple(pieces)


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}{', ...' if len(numbers) > 8 else ''}]"
