"""The steps of the chained backward: which rank adds which rows to which sums."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .layout import Layout, Piece, Tokens
from .plan import Mask


class Step(NamedTuple):
    """Rows of one sequence on one rank, between the rows before and after them.

    Args:
        chain: index of the chain, which is the index of the sequence.
        number: of steps before it.
        rank: that computes it.
        came: the keys [begin, end) whose sums come from the step before.
        goes: the keys whose sums go to the next step.
        before: rank of the step before; -1: none.
        after: rank of the next step; -1: none.
        piece: index of its rows among the pieces of the rank.
        ended: the keys whose sums are complete, as pieces of what the rank completes.
    """

    chain: int
    number: int
    rank: int
    came: tuple[int, int]
    goes: tuple[int, int]
    before: int
    after: int
    piece: int
    ended: tuple[Piece, ...]


class Steps(NamedTuple):
    """All steps.

    Args:
        steps: of all ranks.
        ended: the keys that each rank completes.
        room: number of keys that each rank completes.
        longest: steps of the longest chain, at least 1.
    """

    steps: tuple[Step, ...]
    ended: Layout
    room: tuple[int, ...]
    longest: int


@functools.lru_cache(maxsize=64)
def find_steps(q: Tokens, k: Tokens, mask: Mask, last_first: bool = False) -> Steps:
    """Lists the steps of all chains in the order of the rows, or in the opposite one."""
    chains: dict[int, list[tuple[Piece, int, int]]] = {}
    for rank, own in enumerate(q.layout):
        for index, piece in enumerate(own):
            chains.setdefault(piece.sequence, []).append((piece, rank, index))
    steps = []
    ended: list[list[Piece]] = [[] for _ in q.layout]
    room = [0 for _ in q.layout]
    for sequence, pieces in sorted(chains.items()):
        pieces.sort(key=lambda one: one[0].begin, reverse=last_first)
        offset = k.lengths[sequence] - q.lengths[sequence]
        seen = [mask.keys(p.begin, p.end, offset, k.lengths[sequence]) for p, _, _ in pieces]
        came = (0, 0)
        for number, (_, rank, index) in enumerate(pieces):
            last = number + 1 == len(pieces)
            goes = (0, 0) if last else _both(seen[number], seen[number + 1])
            complete = []
            # Keys that the next rows don't see are not seen by later ones either: they are
            # complete.
            begin, end = seen[number]
            leave = ((begin, end),) if goes == (0, 0) else ((begin, goes[0]), (goes[1], end))
            for first, last_key in leave:
                if first < last_key:
                    complete.append(Piece(sequence, first, last_key, room[rank]))
                    room[rank] += last_key - first
            ended[rank] += complete
            steps.append(
                Step(
                    sequence,
                    number,
                    rank,
                    came,
                    goes,
                    pieces[number - 1][1] if number and came[0] < came[1] else -1,
                    -1 if last or goes[0] == goes[1] else pieces[number + 1][1],
                    index,
                    tuple(complete),
                )
            )
            came = goes
    longest = max((step.number + 1 for step in steps), default=1)
    return Steps(tuple(steps), tuple(map(tuple, ended)), tuple(room), longest)


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else (0, 0)


class Unit(NamedTuple):
    """Query heads whose sums are computed and sent together.

    Args:
        number: of the KV heads that are gathered for them.
        keys: those KV heads.
        heads: the query heads: one or two, or all that share several KV heads.
        first: whether they are the first that share these KV heads.
        last: whether they are the last.
    """

    number: int
    keys: slice
    heads: slice
    first: bool
    last: bool


def head_slices(nheads_k: int, heads_k: int) -> list[slice]:
    """Cuts KV heads into slices of heads_k."""
    return [slice(h, min(h + heads_k, nheads_k)) for h in range(0, nheads_k, heads_k)]


# Most bytes of keys and values of a slice, if the caller gives no number of heads; a single head
# may have more. A rank holds three slices: one in use, one sent, one received.
_SLICE_BYTES = 256 * 2**20


def heads_of_forward(heads_k: int, nheads_k: int, head_bytes: int) -> int:
    """Returns how many KV heads a forward gathers at a time.

    The fewer heads a kernel has, the more SMs are idle at its end; but the more heads are gathered
    at first, the longer the wait before the first kernel. So at most half of them, rounded up.

    Args:
        heads_k: number given by the caller; 0: none.
        nheads_k: KV heads.
        head_bytes: keys and values of one head on all ranks, so that all ranks choose the same.
    """
    return heads_k or max(1, min(math.ceil(nheads_k / 2), _SLICE_BYTES // max(1, head_bytes)))


# With this many units for each rank after the first, a unit has two query heads. With more units,
# ranks wait less for the first and the last one. But a kernel on one head leaves many SMs idle at
# its end: under a causal mask 16,384 rows have 128 CTAs of key blocks, and the longest takes twice
# the average; with two heads, CTAs of one fill the gaps of the other. Estimated, not measured yet.
_MANY_UNITS = 16
# Query heads of a unit, if set: for measurements. No bit depends on it.
UNIT_HEADS: int | None = None


def find_units(nheads: int, nheads_k: int, heads_k: int, ranks: int) -> list[Unit]:
    """Divides the heads into units: of one or two query heads if heads_k is 1."""
    group = nheads // nheads_k
    wanted = UNIT_HEADS or (2 if nheads >= 2 * _MANY_UNITS * (ranks - 1) else 1)
    units = []
    for number, span in enumerate(head_slices(nheads_k, heads_k)):
        begin, end = span.start * group, span.stop * group
        step = math.gcd(group, wanted) if heads_k == 1 else end - begin
        for head in range(begin, end, step):
            heads = slice(head, head + step)
            units.append(Unit(number, span, heads, head == begin, heads.stop == end))
    return units
