"""The backward that passes running sums of dk and dv from rank to rank.

dk and dv of a key are a sum over the rows that see it, in one order. So the sums of a query head
start on the rank with the first rows in that order, go from rank to rank with the rows, and end on
the rank with the last ones: unrounded, one float32 sum for each key and query head. Heads are
independent: while the sums of one head are at the second rank, the first rank works on the next
head. A rank sends only the sums of keys that later rows see too.

Where a device adds rows in blocks, a border between ranks inside a block moves to its end: the rows
of the block go to the rank that has the first of them, and their dq comes back.

All ranks go through the same waves. In a wave a rank computes a step of one head, receives the sums
for the next wave, and sends those of the wave before. Messages travel while kernels run, so a step
comes two waves after the step before it of the same head. All that a rank sends and receives in a
wave is one batch in the group's order of launches; on every rank the gathering of keys for the wave
comes right before it. A batch waits only for earlier waves and the other ranks' batches of the same
wave, so there is no deadlock, and a rank holds the sums of at most three waves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...types import Gradients
from ..messages import exchange
from ..messages.ranks import Message, Ranks
from ..planning.layout import Layout, Tokens, in_blocks, stored_tokens
from ..planning.plan import Part, call_of, divided, rows_on_keys
from ..planning.steps import Step, Unit, find_steps, find_units
from .forward import KEYS, gathered
from .gathered_backward import whole_sequences, zeros_like
from .op_calls import Numbers, Rows, Sums, backward_step, finish, row_order

LAG = 2  # waves from a step to the next one of the same head: one computes, one sends


def backward(
    ranks: Ranks,
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens_q: Tokens,
    tokens_k: Tokens,
    scores: Numbers,
    heads_k: int,
) -> Gradients:
    """Computes what `gathered_backward.backward` does."""
    gradients = dq, dk, dv = zeros_like(rows.q, k, v)
    parts = divided(tokens_q, tokens_k, scores.mask, ranks.rank)
    whole_sequences(parts.calls, rows, k, v, scores, gradients)
    if not parts.travels:
        return gradients
    order = row_order(rows.q.device)
    blocks = in_blocks(parts.q, order.block)
    own_rows, dq_rows = rows, dq
    if blocks != parts.q:
        own_rows = Rows(*_moved(ranks, parts.q, blocks, rows, "rows"))
        dq_rows = torch.zeros_like(own_rows.q)
    half = rows_on_keys(blocks, parts.k, scores.mask, scores.key_align, ranks.rank)
    chains = find_steps(blocks, parts.k, scores.mask, order.last_first)
    way = exchange.route(parts.k.layout, half.wanted, ranks.rank, half.room)
    units = find_units(rows.q.shape[1], k.shape[1], heads_k, ranks.size)
    mine = [step for step in chains.steps if step.rank == ranks.rank]
    latest = max((step.number for step in mine), default=0)
    totals = Totals(chains.room[ranks.rank], own_rows.q, k, scores)
    keys: dict[int, list[torch.Tensor]] = {}
    arriving = gathered(ranks, way, [k, v], k.shape[1], heads_k, KEYS)

    def take(step: Step, unit: Unit, arrived: torch.Tensor | None) -> list[Message]:
        """Computes a step, and returns messages with the sums that the next one needs."""
        part, heads = half.parts[step.piece], unit.heads
        sums = _sums(arrived, part, own_rows.q[:, heads])
        call = call_of(part)
        if call is not None:
            here_k, here_v = (tensor[call.keys] for tensor in keys[unit.number])
            here = own_rows.of_heads(heads).of(call)
            dq_rows[call.rows, heads] = backward_step(here, here_k, here_v, call, scores, sums)
        for piece in step.ended:
            totals.add(piece.stored, unit, _of_keys(sums, part, (piece.begin, piece.end)))
        if step.after < 0:
            return []
        return [(one, step.after) for one in _of_keys(sums, part, step.goes)]

    coming: dict[Step, torch.Tensor] = {}
    going: list[Message] = []
    travelling = ranks.exchange([], [], SUMS)
    for wave in range(len(units) + LAG * (chains.longest - 1)):
        if wave < len(units) and units[wave].number not in keys:
            _, keys[units[wave].number] = next(arriving)
        travelling.wait()
        came, coming, awaited = coming, {}, []
        for step, unit in _at(wave + 1, mine, units):
            if step.before >= 0:
                part = half.parts[step.piece]
                coming[step], places = _room(part, own_rows.q[:, unit.heads], step.came)
                awaited += [(place, step.before) for place in places]
        travelling, going = ranks.exchange(going, awaited, SUMS), []
        for step, unit in _at(wave, mine, units):
            going += take(step, unit, came.pop(step, None))
        # Later waves of this rank need no keys of earlier heads than its latest step in the next.
        oldest = units[max(0, min(wave + 1 - LAG * latest, len(units) - 1))].number
        keys = {number: one for number, one in keys.items() if number >= oldest}
    travelling.wait()
    if blocks != parts.q:
        _bring(ranks, blocks.layout, parts.q.layout, [dq_rows], [dq], "dq")
    _bring(ranks, chains.ended, parts.k.layout, totals.results, [dk, dv], "dk and dv")
    return gradients


SUMS = "sums of dk and dv"  # for errors


def _at(wave: int, steps: Sequence[Step], units: Sequence[Unit]) -> Iterator[tuple[Step, Unit]]:
    """Yields the steps of a wave with their heads."""
    for step in steps:
        if 0 <= wave - LAG * step.number < len(units):
            yield step, units[wave - LAG * step.number]


class Totals:
    """dk and dv of the keys whose sums end on this rank.

    Query heads that share KV heads are added first to last and rounded once, so their sums are held
    until the last of them arrives.

    Args:
        keys: how many.
        q: any tensor of the query heads, (rows, nheads, head_dim).
        k: any tensor of the KV heads, (tokens, nheads_k, head_dim).
        scores: of the call.
    """

    def __init__(self, keys: int, q: torch.Tensor, k: torch.Tensor, scores: Numbers) -> None:
        self.results = [k.new_empty((keys, *k.shape[1:])) for _ in range(2)]
        self._scores, self._group = scores, q.shape[1] // k.shape[1]
        self._sums: torch.Tensor | None = None

    def add(self, place: slice, unit: Unit, sums: Sums) -> None:
        """Adds the sums (keys, heads of the unit, head_dim) of some keys."""
        if not (unit.first and unit.last):  # of one KV head
            if self._sums is None:
                keys, _, head_dim = self.results[0].shape
                self._sums = sums[0].new_empty((2, keys, self._group, head_dim))
            first = unit.keys.start * self._group
            of_unit = slice(unit.heads.start - first, unit.heads.stop - first)
            for held, one in zip(self._sums, sums, strict=True):
                held[place, of_unit] = one
            sums = (self._sums[0, place], self._sums[1, place])
        if unit.last:
            of_heads = self.results[0][:, unit.keys]
            finished = finish(sums, of_heads, self._scores)
            for result, one in zip(self.results, finished, strict=True):
                result[place, unit.keys] = one


def _moved(
    ranks: Ranks, here: Tokens, there: Tokens, tensors: Sequence[torch.Tensor], what: str
) -> list[torch.Tensor]:
    """Returns this rank's parts of tensors in another layout."""
    room = stored_tokens(there.layout[ranks.rank])
    way = exchange.route(here.layout, there.layout, ranks.rank, room)
    return exchange.start(ranks, way, tensors, what).wait()


def _bring(
    ranks: Ranks,
    here: Layout,
    there: Layout,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    what: str,
) -> None:
    """Writes tensors into results that have another layout."""
    way = exchange.route(here, there, ranks.rank, results[0].shape[0])
    arrived = exchange.start(ranks, way, tensors, what).wait()
    for result, found in zip(results, arrived, strict=True):
        for piece in there[ranks.rank]:
            result[piece.stored] = found[piece.stored]


def _room(
    part: Part, q: torch.Tensor, arriving: tuple[int, int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocates the sums of dk and dv, (2, keys of the part, *q.shape[1:]).

    Args:
        part: with the keys.
        q: (rows, heads of a unit, head_dim).
        arriving: the keys [begin, end) whose sums will be received; those of others are 0.

    Returns:
        The tensor, and the views of it that receive the sums of dk and of dv.
    """
    count = part.keys.end - part.keys.begin
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    room = q.new_empty((2, count, *q.shape[1:]), dtype=dtype)
    begin, end = (key - part.keys.begin for key in arriving)
    room[:, :begin] = 0
    room[:, end:] = 0
    return room, [one[begin:end] for one in room]


def _sums(arrived: torch.Tensor | None, part: Part, q: torch.Tensor) -> Sums:
    """Returns the sums that a step adds to: those that arrived, or 0."""
    if arrived is None:
        arrived, _ = _room(part, q, (part.keys.begin, part.keys.begin))
    return arrived[0], arrived[1]


def _of_keys(sums: Sums, part: Part, keys: tuple[int, int]) -> Sums:
    place = slice(keys[0] - part.keys.begin, keys[1] - part.keys.begin)
    return sums[0][place], sums[1][place]
