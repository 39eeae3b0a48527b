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
KeySums = Sequence[torch.Tensor]


class Rows(NamedTuple):
    """Rows with their results: (rows, nheads, head_dim), and softmax_lse (nheads, rows)."""

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

    def _start(self, head: int) -> tuple[_Step, list[Arriving]] | None:
        if head >= self._each:
            return None
        part = self._part
        step = _Step(self._first, head, min(part.heads, self._each - head), self._group)
        keys = [*map(step.keys, self._keys)]
        sent = [(part.keys, keys)]
        if part.rows is not None:
            rows = [*map(step.rows, self._rows)]
            # On the same way, both are one message.
            sent = (
                [(part.keys, rows + keys)] if part.rows is part.keys else [(part.rows, rows), *sent]
            )
        return step, [
            Arriving(self._ranks, way, tensors, "rows and keys")
            for way, tensors in sent
            if way is not None
        ]

    def __iter__(self) -> Iterator[tuple[_Step, Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
        """Yields each step, with the rows of its heads, whether they came or not, and keys."""
        while self._coming is not None:
            step, arriving = self._coming
            found = []
            if self._part.rows is None:
                found = [tensor[:, step.of_rows] for tensor in self._rows]
            found += [tensor for message in arriving for tensor in message.new()]
            self._coming = self._start(step.head + step.size)
            count = len(self._rows)
            rows, keys = found[:count], found[count:]
            del found, arriving
            yield step, rows, keys


def forward(
    ranks: Ranks,
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of this rank's rows.

    Args:
        ranks: over which the sequences are distributed.
        plan: of the call.
        q: (tokens of q on this rank, nheads, head_dim).
        k: (tokens of k on this rank, nheads_k, head_dim).
        v: like k.
        options: of the call; each op has a window of its own.
        learnable_sink: (nheads,), float32; each row sees it once, with all its keys.

    Returns:
        out like q, and softmax_lse (nheads, tokens of q) in the computing dtype; 0 and +inf in rows
        of no sequence.
    """
    part = plan.forward
    steps = _Steps(ranks, plan.degree, part, (q,), (k, v))
    # While the first keys come, sequences that need none.
    local = [_attend(call, q, (k, v), options, learnable_sink) for call in plan.local]
    if part.keys is None:
        return _outputs(local, q)
    out = softmax_lse = None
    if part.rows is not None:
        out, softmax_lse = q.new_zeros(q.shape), _endless(q, q.shape[:2]).t()
    going: Callable[[], None] = _nothing
    for step, (rows, *_), keys in steps:
        sink = None if learnable_sink is None else learnable_sink[step.of_rows]
        of_calls = [_attend(call, rows, keys, options, sink) for call in part.calls]
        found, lse = _outputs(of_calls, rows)
        if part.rows is None:
            out = _with_heads(out, found, step, q.shape[1], 1)
            softmax_lse = _with_heads(softmax_lse, lse, step, q.shape[1], 0)
            continue
        assert out is not None
        assert softmax_lse is not None
        sent = Arriving(ranks, part.rows.back, _whole(found, lse.t()[..., None]), "results")
        going()
        targets = [*map(step.rows, (out, softmax_lse.t()[..., None]))]
        going = functools.partial(sent.into, targets)
    going()
    assert out is not None
    assert softmax_lse is not None
    for one, of_rows, lse in local:
        out[one], softmax_lse[:, one] = of_rows, lse
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
    of_rows = rows[:3] if part.rows is None else (*rows[:3], rows.softmax_lse.t()[..., None])
    steps = _Steps(ranks, plan.degree, part, of_rows, (k, v))
    local = [_backward_call(call, rows, (k, v), options) for call in plan.local]
    dk, dv = (one.new_zeros(one.shape) for one in (k, v))
    for call, (_, dk_, dv_) in zip(plan.local, local, strict=True):
        dk[call.keys], dv[call.keys] = dk_, dv_
    of_local = [(call.rows, found[0]) for call, found in zip(plan.local, local, strict=True)]
    if part.keys is None:
        return _joined(of_local, rows.q, 0), dk, dv
    dq = None if part.rows is None else rows.q.new_zeros(rows.q.shape)
    going: list[Callable[[], None]] = []
    for step, (dout, q, out, *lse), keys in steps:
        here = Rows(dout, q, out, lse[0][..., 0].t() if lse else rows.softmax_lse[step.of_rows])
        whole = [_backward_call(call, here, keys, options) for call in part.calls]
        runs = [_backward_call(call, here, keys, options, sums=True) for call, _ in part.runs]
        calls = *part.calls, *(call for call, _ in part.runs)
        own = zip(calls, (*whole, *runs), strict=True)
        found = _joined([(call.rows, gradients[0]) for call, gradients in own], q, 0)
        sent: list[Callable[[], None]] = []
        moving = []
        if part.rows is None:
            dq = _with_heads(dq, found, step, rows.q.shape[1], 1)
        else:
            assert dq is not None
            moving.append((part.rows.back, [found], [step.rows(dq)]))
        if part.whole is not None:
            both = [
                _joined(
                    [(call.keys, one[side]) for call, one in zip(part.calls, whole, strict=True)],
                    keys[0],
                    0,
                    part.whole_room,
                )
                for side in (1, 2)
            ]
            targets = [step.keys(dk), step.keys(dv)]
            if moving and moving[0][0] == part.whole:  # on the same way: one message
                moving = [(part.whole, [*moving[0][1], *both], [*moving[0][2], *targets])]
            else:
                moving.append((part.whole, both, targets))
        del dout, q, out, lse, here, keys, whole, found
        for route, results, targets in moving:
            arriving = Arriving(ranks, route, _whole(*results), "gradients")
            sent.append(functools.partial(arriving.into, targets))
        if part.sums is not None:
            sums = _Sums(ranks, plan.degree, part.sums, step, [one[1:] for one in runs], k)
            sent.append(functools.partial(sums.add_up, options, k, dk, dv))
        for end in going:
            end()
        going = sent
    for end in going:
        end()
    assert dq is not None
    for one, found in of_local:
        dq[one] = found
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
        self._begins = [0, *itertools.accumulate(received)]
        self._arrived, nothing = (
            k.new_empty((rows, step.size, k.shape[2]), dtype=_of_sums(k))
            for rows in (self._begins[-1], 0)
        )
        data = [found[number][side][keys] for _, side, number, keys in plan.sent]
        self._pending = ranks.all_to_all(
            torch.cat([nothing, *data]), self._arrived, sent, received, "sums"
        )

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


def _attend(
    call: Call,
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    options: Options,
    sink: torch.Tensor | None,
) -> tuple[slice, torch.Tensor, torch.Tensor]:
    """Returns the rows of a call, their out, and their softmax_lse (nheads, rows)."""
    inputs = q[call.rows], keys[0][call.keys], keys[1][call.keys]
    lengths, own = call.given(q.device, options)
    out, softmax_lse = run(schemas.forward_call(inputs, lengths, own, None, learnable_sink=sink))
    return call.rows, out, softmax_lse


def _backward_call(
    call: Call, rows: Rows, keys: Sequence[torch.Tensor], options: Options, sums: bool = False
) -> Gradients:
    """Computes dq, dk and dv of a call, rounded; with sums, dq and the sums of dk and dv."""
    dout, q, out = (one[call.rows] for one in rows[:3])
    inputs = q, keys[0][call.keys], keys[1][call.keys]
    lengths, own = call.given(q.device, options)
    lse = rows.softmax_lse[:, call.rows].contiguous()
    gradients: Gradients = run(
        schemas.backward_call(dout, inputs, out, lse, lengths, own, None, None, sums)
    )
    return gradients


def _outputs(
    found: Sequence[tuple[slice, torch.Tensor, torch.Tensor]], q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins results of calls on some rows of q; 0 and +inf in rows of no call."""
    lse = found[0][2] if found else _endless(q, (q.shape[1], 0))
    return (
        _joined([(rows, out) for rows, out, _ in found], q, 0),
        _joined([(rows, of_rows) for rows, _, of_rows in found], lse, 1, q.shape[0], math.inf),
    )


def _joined(
    found: Sequence[tuple[slice, torch.Tensor]],
    like: torch.Tensor,
    dim: int,
    total: int | None = None,
    fill: float = 0.0,
) -> torch.Tensor:
    """Joins pieces of a tensor; one that is all of it is not copied.

    Args:
        found: the pieces, and where they lie in a dimension.
        like: has dtype and shape of the tensor, but for `total`.
        dim: the dimension.
        total: length in it; None: that of `like`.
        fill: what is elsewhere.
    """
    total = like.shape[dim] if total is None else total
    pieces, end = [], 0
    for where, piece in (*sorted(found, key=lambda one: one[0].start), (slice(total, total), None)):
        if where.start > end:
            shape = *like.shape[:dim], where.start - end, *like.shape[dim + 1 :]
            pieces.append(like.new_full(shape, fill))
        if piece is not None:
            pieces.append(piece)
        end = where.stop
    if not pieces:
        return like.new_empty((*like.shape[:dim], 0, *like.shape[dim + 1 :]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _with_heads(
    into: torch.Tensor | None, found: torch.Tensor, step: _Step, nheads: int, dim: int
) -> torch.Tensor:
    """Puts the heads of a step into a tensor with all; if the step has all, `found` is this."""
    if found.shape[dim] == nheads:
        return found
    if into is None:
        into = found.new_empty((*found.shape[:dim], nheads, *found.shape[dim + 1 :]))
    into.narrow(dim, step.of_rows.start, found.shape[dim]).copy_(found)
    return into


def _whole(*tensors: torch.Tensor) -> list[Heads]:
    return [Heads(one, 0, one.shape[1]) for one in tensors]


def _endless(q: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns softmax_lse of rows that see nothing."""
    return q.new_full([*shape], math.inf, dtype=_of_sums(q))


def _of_sums(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _added(left: KeySums, right: KeySums) -> KeySums:
    return left[0] + right[0], left[1] + right[1]
