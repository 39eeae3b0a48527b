"""Runs of chunks of rows, whose sums of dk and dv ranks send to the ranks of the keys."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from .layout import Layout, Piece, Tokens, in_blocks
from .plan import Mask


class Run(NamedTuple):
    """An aligned run of chunks on one rank.

    Args:
        rows: the piece of rows.
        node: (n, i) for the i-th run of 2^n chunks.
        keys: [begin, end) that the rows see.
    """

    rows: Piece
    node: tuple[int, int]
    keys: tuple[int, int]


class Arrival(NamedTuple):
    """Where the sums for a piece of keys arrive.

    Args:
        keys: the piece.
        chunks: of its sequence.
        sums: for each run that sees keys of the piece, its node and where its sums begin.
    """

    keys: Piece
    chunks: int
    sums: tuple[tuple[tuple[int, int], int], ...]


class Sums(NamedTuple):
    """How sums travel.

    Args:
        sent: keys of the runs of each rank, as pieces of sequences of their own.
        wanted: the same keys, where they are kept.
        room: keys of the sums that this rank gets, gaps included.
        arrivals: for each piece of keys of this rank.
    """

    sent: Layout
    wanted: Layout
    room: int
    arrivals: tuple[Arrival, ...]


def suits(q: Tokens, k: Tokens, mask: Mask, chunk: int) -> bool:
    """Returns whether whole chunks leave each rank at most 1.5 times the work of the fullest."""

    def most(tokens: Tokens) -> float:
        return max(sum(map(work, own)) for own in tokens.layout)

    def work(piece: Piece) -> float:
        length_k = k.lengths[piece.sequence]
        offset = length_k - q.lengths[piece.sequence]
        seen = 0
        for row in (piece.begin, piece.end - 1):
            begin, end = mask.keys(row, row + 1, offset, length_k)
            seen += end - begin
        return (piece.end - piece.begin) * seen / 2

    return most(in_blocks(q, chunk)) <= 1.5 * most(q)


@functools.lru_cache(maxsize=64)
def cut_into_runs(tokens: Tokens, chunk: int) -> Tokens:
    """Cuts pieces that begin and end with chunks into aligned runs of 2^n chunks, each as long as
    possible."""
    layout = []
    for own in tokens.layout:
        pieces = []
        for piece in own:
            begin = piece.begin
            while begin < piece.end:
                end = min(piece.end, begin + _chunks_of_run(piece, begin, tokens, chunk) * chunk)
                pieces.append(Piece(piece.sequence, begin, end, piece.at + begin - piece.begin))
                begin = end
        layout.append(tuple(pieces))
    return Tokens(tokens.lengths, tuple(layout))


def _chunks_of_run(piece: Piece, begin: int, tokens: Tokens, chunk: int) -> int:
    """Returns the chunks of the longest run from `begin` on; behind the sequence there are any."""
    first = begin // chunk
    left = -(-(piece.end - begin) // chunk)
    ends = piece.end == tokens.lengths[piece.sequence]
    size = 1
    while (first % (2 * size) == 0) and (2 * size <= left or (ends and size < left)):
        size *= 2
    return size


@functools.lru_cache(maxsize=64)
def find_runs(q: Tokens, k: Tokens, mask: Mask, chunk: int) -> tuple[tuple[Run, ...], ...]:
    """Lists the runs of each rank; q: as `cut_into_runs` returns them."""

    def run(piece: Piece) -> Run:
        size = _chunks_of_run(piece, piece.begin, q, chunk)
        length_k = k.lengths[piece.sequence]
        offset = length_k - q.lengths[piece.sequence]
        keys = mask.keys(piece.begin, piece.end, offset, length_k)
        node = (size.bit_length() - 1, piece.begin // chunk // size)
        return Run(piece, node, keys)

    return tuple(tuple(map(run, own)) for own in q.layout)


@functools.lru_cache(maxsize=64)
def find_sums(q: Tokens, k: Tokens, mask: Mask, chunk: int, rank: int) -> Sums:
    """Plans how the sums of all runs travel to the keys; q: see `find_runs`."""
    runs = find_runs(q, k, mask, chunk)
    numbers = itertools.count()
    by_sequence: dict[int, list[tuple[int, Run]]] = {}
    sent = []
    for own in runs:
        pieces, at = [], 0
        for one in own:
            number, (begin, end) = next(numbers), one.keys
            if begin < end:
                pieces.append(Piece(number, begin, end, at))
                by_sequence.setdefault(one.rows.sequence, []).append((number, one))
                at += end - begin
        sent.append(tuple(pieces))
    wanted, arrivals, own_room = [], [], 0
    for owner, own_keys in enumerate(k.layout):
        pieces, room = [], 0
        for keys in own_keys:
            sums = []
            for number, one in by_sequence.get(keys.sequence, ()):
                begin, end = max(one.keys[0], keys.begin), min(one.keys[1], keys.end)
                if begin < end:
                    pieces.append(Piece(number, begin, end, room + begin - keys.begin))
                    sums.append((one.node, room))
                    room += keys.end - keys.begin
            if owner == rank:
                chunks = -(-q.lengths[keys.sequence] // chunk)
                arrivals.append(Arrival(keys, chunks, tuple(sums)))
                own_room = room
        wanted.append(tuple(pieces))
    return Sums(tuple(sent), tuple(wanted), own_room, tuple(arrivals))
