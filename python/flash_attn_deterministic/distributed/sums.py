"""Sums of dk and dv over runs of chunks, added in the order of the tree on the rank of the key.

The order is planned once: in each step pieces of tensors are added to others, all at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import tree


class Sums(NamedTuple):
    """How sums of runs go to the ranks of the keys, which add them.

    A piece has the rows of some keys in a tensor (keys, heads of a step, head_dim). They are
    numbered: those that arrive, then this rank's own ones, then those of the results.
    """

    sent: tuple[tuple[int, slice], ...]  # pieces of messages: run, keys of its call; dk, then dv
    counts: tuple[list[int], list[int]]  # rows of the message to each rank, and of that from each
    arriving: tuple[int, ...]  # rows of each piece
    own: tuple[tuple[int, int, slice], ...]  # run, 0 for dk or 1 for dv, keys of its call
    # Copied into the results: dk, then dv; of each the parts of heads; of each some of the keys.
    first: tuple[int, ...]
    added: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # at a time: to these pieces those
    keys: tuple[slice, ...]  # of this rank's tensors, that the results are of


class Origin(NamedTuple):
    """Where the sums of a run for some keys come from."""

    team: int  # that computes the run
    dk: int  # row in the team's message
    length: int  # rows from there to those of dv
    run: int  # of this rank; -1: of another
    here: int  # row in that run's sums


_Source = tuple[int, ...]  # (rows, -1, row that arrives), or (rows, run, row, 0 for dk or 1 for dv)


def sums_of(
    some: list[tuple[int, int, int, dict[tuple[int, int], Origin]]],
    rank: int,
    degree: int,
    arrives: list[int],
    sent: tuple[tuple[int, slice], ...],
    counts: tuple[list[int], list[int]],
) -> Sums:
    """Plans what a rank adds to what, in the order of the tree.

    Args:
        some: neighbouring keys that are seen by the same runs: row of the first key in this rank's
            tensors, their number, chunks of their sequence, where the sums of each run come from.
        rank: this rank.
        degree: ranks over which heads are divided.
        arrives: row where the message of each rank begins.
        sent: of `Sums`; counts too.
        counts: see sent.
    """
    first: list[_Source] = []
    leaves: list[_Source] = []
    steps: list[list[tuple[_Source, _Source]]] = []

    def source(origin: Origin, rows: int, side: int, head: int) -> _Source:
        by = origin.team * degree + head
        leaf: _Source = rows, -1, arrives[by] + origin.dk + side * origin.length
        if by == rank:
            leaf = rows, origin.run, origin.here, side
        leaves.append(leaf)
        return leaf

    def after(left: tuple[int, _Source], right: tuple[int, _Source]) -> tuple[int, _Source]:
        step = max(left[0], right[0])  # the first one after those that make both
        if step == len(steps):
            steps.append([])
        steps[step].append((left[1], right[1]))
        return step + 1, left[1]

    some.sort(key=lambda one: one[0])
    for side, head in itertools.product((0, 1), range(degree)):
        for _, rows, chunks, origins in some:
            sums = {node: (0, source(one, rows, side, head)) for node, one in origins.items()}
            total = tree.add_up(sums, chunks, after)
            assert total is not None
            first.append(total[1])
    arriving = sorted((one for one in leaves if one[1] < 0), key=lambda one: one[2])
    own = [one for one in leaves if one[1] >= 0]
    number = {one: index for index, one in enumerate((*arriving, *own))}
    into = number | {one: len(number) + index for index, one in enumerate(first)}
    keys: list[slice] = []
    for begin, rows, *_ in some:
        joins = bool(keys) and keys[-1].stop == begin
        keys.append(slice(keys.pop().start if joins else begin, begin + rows))
    return Sums(
        sent,
        counts,
        tuple(rows for rows, *_ in arriving),
        tuple((run, side, slice(row, row + rows)) for rows, run, row, side in own),
        tuple(number[one] for one in first),
        tuple(
            (tuple(into[left] for left, _ in step), tuple(number[right] for _, right in step))
            for step in steps
        ),
        tuple(keys),
    )


def added(
    plan: Sums, arrived: torch.Tensor, found: Sequence[Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Adds sums, into the given tensors too: (rows, heads, head_dim), float32.

    `arrived` is what other ranks have sent; `found` has for each run of this rank sums of dk and of
    dv, for all keys of its call. Returns the totals in the order of the plan's `first`.
    """
    pieces = [
        *arrived.split_with_sizes(plan.arriving),
        *(found[run][side][keys] for run, side, keys in plan.own),
    ]
    first = [pieces[number] for number in plan.first]
    total = torch.cat(first)
    pieces += total.split_with_sizes([one.shape[0] for one in first])
    for into, what in plan.added:
        torch._foreach_add_([pieces[one] for one in into], [pieces[one] for one in what])
    return total
