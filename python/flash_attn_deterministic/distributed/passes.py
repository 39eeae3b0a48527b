"""Forward and backward of one rank: attention ops, and messages between them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import schemas, tree
from ..ops.autograd import run
from ..types import Gradients, Options

# Defines the ops.
from ..ops import library as library  # isort: skip
from .exchange import Arriving, Heads
from .plan import Call, Part, Pass, Plan
from .plan import Sums as SumsPlan
from .ranks import Ranks

# Sums of dk, without softmax_scale, and of dv over some rows: (keys, nheads_k, head_dim), float32.
KeySums = tuple[torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """Rows with their results: (rows, nheads, head_dim), and softmax_lse (rows, nheads)."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor


class _Step(NamedTuple):
    """Some heads, the same ones of the part of each rank among those that divide heads."""

    first: int  # KV head of this rank's part
    head: int  # the step's first KV head in a part
    size: int  # KV heads
    group: int  # query heads of each

    @property
    def of_rows(self) -> slice:
        """Returns the query heads that this rank computes."""
        first = (self.first + self.head) * self.group
        return slice(first, first + self.size * self.group)

    def rows(self, tensor: torch.Tensor) -> Heads:
        """Returns the query heads of each part of a tensor with all of them."""
        return Heads(tensor, self.head * self.group, self.size * self.group)

    def keys(self, tensor: torch.Tensor) -> Heads:
        """Returns the KV heads likewise."""
        return Heads(tensor, self.head, self.size)


class _Steps:
    """The steps of a pass: the messages of the next one travel while one is computed.

    Args:
        ranks: over which the sequences are distributed.
        degree: ranks over which heads are divided.
        part: of this rank.
        rows: tensors (tokens, nheads, ...) that come unless rows stay.
        keys: tensors (tokens, nheads_k, ...) that come.
    """

    def __init__(
        self,
        ranks: Ranks,
        degree: int,
        part: Pass,
        rows: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
    ) -> None:
        self._ranks, self._part, self._rows, self._keys = ranks, part, rows, keys
        each = keys[0].shape[1] // degree
        self._first, self._each = ranks.rank % degree * each, each
        self._group = rows[0].shape[1] // keys[0].shape[1]
        self._coming = None if part.keys is None else self._start(0)

    def _start(self, head: int) -> tuple[_Step, Arriving | None, Arriving] | None:
        if head >= self._each:
            return None
        part = self._part
        step = _Step(self._first, head, min(part.heads, self._each - head), self._group)
        rows = None
        if part.rows is not None:
            sent = [*map(step.rows, self._rows)]
            rows = Arriving(self._ranks, part.rows, sent, "rows and keys")
        assert part.keys is not None
        keys = Arriving(self._ranks, part.keys, [*map(step.keys, self._keys)], "rows and keys")
        return step, rows, keys

    def __iter__(self) -> Iterator[tuple[_Step, Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
        """Yields each step, with the rows of its heads, whether they came or not, and keys."""
        while self._coming is not None:
            step, arriving, keys_arriving = self._coming
            if arriving is None:
                rows = [tensor[:, step.of_rows] for tensor in self._rows]
            else:
                rows = arriving.new()
            keys = keys_arriving.new()
            self._coming = self._start(step.head + step.size)
            yield step, rows, keys


def forward(
    ranks: Ranks,
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of this rank's rows.

    Args:
        ranks: over which the sequences are distributed.
        plan: of the call.
        q: (tokens of q on this rank, nheads, head_dim).
        k: (tokens of k on this rank, nheads_k, head_dim).
        v: like k.
        options: of the call; each op has a window of its own.

    Returns:
        out like q, and softmax_lse (tokens of q, nheads) in the computing dtype; 0 and +inf in rows
        of no sequence.
    """
    part = plan.forward
    steps = _Steps(ranks, plan.degree, part, (q,), (k, v))
    # While the first keys come, sequences that need none.
    here = plan.local if part.rows is not None else (*plan.local, *part.calls)
    out, softmax_lse = _results(q, here)
    _attend(plan.local, q, (k, v), out, softmax_lse, options)
    going: Callable[[], None] = _nothing
    for step, (rows, *_), keys in steps:
        if part.rows is None:
            at = step.of_rows
            _attend(part.calls, rows, keys, out[:, at], softmax_lse[:, at], options)
            continue
        found = _results(rows, part.calls)
        _attend(part.calls, rows, keys, *found, options)
        results = [Heads(one, 0, one.shape[1]) for one in (found[0], found[1][..., None])]
        sent = Arriving(ranks, part.rows.back, results, "results")
        going()
        targets = [*map(step.rows, (out, softmax_lse[..., None]))]
        going = functools.partial(sent.into, targets)
    going()
    return out, softmax_lse


def backward(
    ranks: Ranks, plan: Plan, rows: Rows, k: torch.Tensor, v: torch.Tensor, options: Options
) -> Gradients:
    """Computes the gradients of this rank's q, k and v.

    Args:
        ranks: as in `forward`; plan, k, v and options too.
        plan: see ranks.
        rows: of this rank, with their results.
        k: see ranks.
        v: see ranks.
        options: see ranks.

    Returns:
        dq, dk and dv, like q, k and v; 0 for tokens of no sequence.
    """
    part = plan.backward
    of_rows = (*rows[:3], rows.softmax_lse[..., None])
    steps = _Steps(ranks, plan.degree, part, of_rows, (k, v))
    calls = *part.calls, *(one.call for one in part.runs)
    dq = _new(rows.q, plan.local if part.rows is not None else (*plan.local, *calls))
    dk, dv = (one.new_zeros(one.shape) for one in (k, v))
    for call in plan.local:
        dq[call.rows], dk[call.keys], dv[call.keys] = _backward_call(rows, (k, v), call, options)
    going: list[Callable[[], None]] = []
    for step, (dout, q, out, lse), keys in steps:
        here = Rows(dout, q, out, lse[..., 0])
        into = dq[:, step.of_rows] if part.rows is None else _new(q, calls)
        gradients = [one.new_zeros((part.whole_room, *one.shape[1:])) for one in keys]
        for call in part.calls:
            into[call.rows], gradients[0][call.keys], gradients[1][call.keys] = _backward_call(
                here, keys, call, options
            )
        sums: list[KeySums] = []
        for call, _ in part.runs:
            into[call.rows], *found = _backward_call(here, keys, call, options, sums=True)
            sums.append((found[0], found[1]))
        del dout, q, out, lse, here, keys
        sent: list[Callable[[], None]] = []
        for route, results, targets in (
            (part.rows and part.rows.back, [into], [step.rows(dq)]),
            (part.whole, gradients, [step.keys(dk), step.keys(dv)]),
        ):
            if route is not None:
                heads = [Heads(one, 0, one.shape[1]) for one in results]
                arriving = Arriving(ranks, route, heads, "gradients")
                sent.append(functools.partial(arriving.into, targets))
        if part.sums is not None:
            summing = _Sums(ranks, plan.degree, part.sums, step, sums, k)
            sent.append(functools.partial(summing.add_up, options, k, dk, dv))
        for end in going:
            end()
        going = sent
    for end in going:
        end()
    return dq, dk, dv


class _Sums:
    """Sums of dk and dv of a step: those of this rank's runs, and those on their way to it.

    Args:
        ranks: as in `forward`.
        degree: ranks over which heads are divided.
        plan: of the sums.
        step: the heads.
        found: the sums of each run, for all keys of its call.
        k: of this rank, all heads.
    """

    def __init__(
        self,
        ranks: Ranks,
        degree: int,
        plan: SumsPlan,
        step: _Step,
        found: Sequence[KeySums],
        k: torch.Tensor,
    ) -> None:
        self._rank, self._degree, self._plan, self._step = ranks.rank, degree, plan, step
        self._found = found
        # In a message, dv is behind dk.
        sent, received = ([2 * one for one in side] for side in plan.counts)
        begins, self._begins = ([0, *itertools.accumulate(one)] for one in (sent, received))
        shape = step.size, k.shape[2]
        data, self._arrived = (
            k.new_empty((sum(one), *shape), dtype=_of_sums(k)) for one in (sent, received)
        )
        for to, number, keys, at in plan.sent:
            for one, place in zip(found[number], (at, at + plan.counts[0][to]), strict=True):
                begin = begins[to] + place
                data[begin : begin + keys.stop - keys.start] = one[keys]
        self._pending = ranks.all_to_all(data, self._arrived, sent, received, "sums")

    def add_up(self, options: Options, k: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Writes dk and dv, once the sums have arrived."""
        self._pending.wait()
        each = k.shape[1] // self._degree
        for (keys, chunks, parts), head in itertools.product(
            self._plan.arrivals, range(self._degree)
        ):
            count, first = keys.stop - keys.start, head * each + self._step.head
            heads = slice(first, first + self._step.size)
            sums = {part.node: self._of(part, head, count) for part in parts}
            total = tree.add_up(sums, chunks, _added)
            assert total is not None
            given = *total, k[keys, heads], options.softmax_scale, options.softcap, 0.0
            dk[keys, heads], dv[keys, heads] = run(("finish_key_sums", given))

    def _of(self, part: Part, head: int, count: int) -> KeySums:
        """Returns the sums of a run for `count` keys, of the step's heads in a part of heads."""
        by = part.team * self._degree + head
        if by == self._rank:
            dk, dv = (one[part.here : part.here + count] for one in self._found[part.run])
            return dk, dv
        first = self._begins[by] + part.at
        places = first, first + self._plan.counts[1][by]
        dk, dv = (self._arrived[place : place + count] for place in places)
        return dk, dv


def _nothing() -> None:
    pass


def _of_call(options: Options, call: Call) -> Options:
    """Returns the options of an op: its window is relative to its own rows and keys."""
    left, right = call.mask
    return options._replace(window_left=left, window_right=right)


def _attend(
    calls: Sequence[Call],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    options: Options,
) -> None:
    """Writes out (rows, nheads, head_dim) and softmax_lse (rows, nheads) of calls."""
    for call in calls:
        inputs = q[call.rows], keys[0][call.keys], keys[1][call.keys]
        lengths, own = call.lengths(q.device), _of_call(options, call)
        out[call.rows], lse = run(schemas.forward_call(inputs, lengths, own, None))
        softmax_lse[call.rows] = lse.transpose(0, 1)


def _backward_call(
    rows: Rows,
    keys: Sequence[torch.Tensor],
    call: Call,
    options: Options,
    sums: bool = False,
) -> Gradients:
    """Computes dq, dk and dv of a call, rounded; with sums, dq and the sums of dk and dv."""
    dout, q, out, lse = (one[call.rows] for one in rows)
    inputs = q, keys[0][call.keys], keys[1][call.keys]
    lengths, own = call.lengths(q.device), _of_call(options, call)
    lse = lse.transpose(0, 1).contiguous()
    gradients: Gradients = run(
        schemas.backward_call(dout, inputs, out, lse, lengths, own, None, None, sums)
    )
    return gradients


def _results(q: torch.Tensor, calls: Sequence[Call]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and softmax_lse (rows, heads) before calls on some of the rows."""
    out = _new(q, calls)
    fill = (
        out.new_empty
        if _covers(calls, q.shape[0])
        else functools.partial(out.new_full, fill_value=math.inf)
    )
    return out, fill(q.shape[:2], dtype=_of_sums(q))


def _new(like: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
    """Returns a tensor like the rows of calls; 0 in other rows, if there are some."""
    make = like.new_empty if _covers(calls, like.shape[0]) else like.new_zeros
    return make(like.shape)


def _covers(calls: Sequence[Call], rows: int) -> bool:
    covered: int = sum(call.rows.stop - call.rows.start for call in calls)
    return covered == rows


def _of_sums(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _added(left: KeySums, right: KeySums) -> KeySums:
    return left[0] + right[0], left[1] + right[1]
