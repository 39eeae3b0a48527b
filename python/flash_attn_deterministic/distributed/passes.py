"""Forward and backward of one rank: attention ops, and messages between them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import schemas, tree
from ..ops.autograd import run
from ..types import Gradients, Options

# Defines the ops.
from ..ops import library as library  # isort: skip
from .exchange import Arriving, Heads, Route, in_one_piece
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
        self._ranks, self._part = ranks, part
        # What is sent, once for all steps.
        self._rows = rows if part.rows is None else [*map(in_one_piece, rows)]
        self._keys = keys if part.keys is None else [*map(in_one_piece, keys)]
        each = keys[0].shape[1] // degree
        self._first, self._each = ranks.rank % degree * each, each
        self._group = rows[0].shape[1] // keys[0].shape[1]
        self._coming = None if part.keys is None else self._start(0)

    def _start(self, head: int) -> tuple[_Step, list[Arriving]] | None:
        if head >= self._each:
            return None
        part = self._part
        step = _Step(self._first, head, min(part.heads, self._each - head), self._group)
        rows, keys = [*map(step.rows, self._rows)], [*map(step.keys, self._keys)]
        sent = [(part.rows, rows), (part.keys, keys)]
        if part.rows is part.keys:  # on the same way: one message
            sent = [(part.keys, rows + keys)]
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
        out like q, and softmax_lse (nheads, tokens of q); 0 and +inf in rows of no
        sequence.
    """
    part = plan.forward
    steps = _Steps(ranks, plan.degree, part, (q,), (k, v))
    out = _blank(plan.local, part, q, q.shape)
    lse = _blank(plan.local, part, q, (*q.shape[:2], 1), math.inf, torch.float32)
    targets = out, lse
    # While the first keys come, sequences that need none.
    for call in plan.local:
        _write(targets, call.rows, _attend(call, q, (k, v), options, learnable_sink))
    going: list[Callable[[], None]] = []
    for step, (rows, *_), keys in steps:
        sink = None if learnable_sink is None else learnable_sink[step.of_rows]
        found = [(call.rows, _attend(call, rows, keys, options, sink)) for call in part.calls]
        of_heads = [target[:, step.of_rows] for target in targets]
        if part.rows is None:
            for where, results in found:
                _write(of_heads, where, results)
            continue
        sent = [
            _joined([(where, results[side]) for where, results in found], like, rows.shape[0], fill)
            for side, like, fill in zip((0, 1), of_heads, (0.0, math.inf), strict=True)
        ]
        more = [_sent(ranks, part.rows, sent, [*map(step.rows, targets)], "results")]
        _finish(going)
        going = more
    _finish(going)
    return out, lse[..., 0].t()


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
    dq = _blank(plan.local, part, rows.q, rows.q.shape)
    dk, dv = (one.new_zeros(one.shape) for one in (k, v))
    for call in plan.local:
        dq[call.rows], dk[call.keys], dv[call.keys] = _backward_call(call, rows, (k, v), options)
    going: list[Callable[[], None]] = []
    for step, (dout, q, out, *lse), keys in steps:
        here = Rows(dout, q, out, lse[0][..., 0].t() if lse else rows.softmax_lse[step.of_rows])
        whole = [_backward_call(call, here, keys, options) for call in part.calls]
        runs = [_backward_call(call, here, keys, options, sums=True) for call in part.runs]
        calls = zip((*part.calls, *part.runs), (*whole, *runs), strict=True)
        found = [(call.rows, one[0]) for call, one in calls]
        moving: dict[Route, tuple[list[torch.Tensor], list[Heads]]] = {}
        if part.rows is None:
            for where, one in found:
                dq[where, step.of_rows] = one
        else:
            moving[part.rows] = [_joined(found, q, q.shape[0])], [step.rows(dq)]
        if part.whole is not None:
            for side, target in ((1, dk), (2, dv)):
                pieces = [
                    (call.keys, one[side]) for call, one in zip(part.calls, whole, strict=True)
                ]
                results, targets = moving.setdefault(part.whole, ([], []))  # same way: one message
                results.append(_joined(pieces, keys[0], part.whole.room))
                targets.append(step.keys(target))
        del whole, found
        more = [_sent(ranks, way, *both, "gradients") for way, both in moving.items()]
        if part.sums is not None:
            sums = _Sums(ranks, plan.degree, part.sums, step, [one[1:] for one in runs], k)
            more.append(functools.partial(sums.add_up, options, k, dk, dv))
        _finish(going)
        going = more
    _finish(going)
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
        sent, received = ([2 * one for one in side] for side in plan.counts)  # dk and dv
        self._begins = [0, *itertools.accumulate(received)]
        shape = self._begins[-1], step.size, k.shape[2]
        self._arrived = k.new_empty(shape, dtype=torch.float32)
        data = [found[run][side][keys] for run, keys in plan.sent for side in (0, 1)]
        message = torch.cat([self._arrived[:0], *data])
        self._pending = ranks.all_to_all(message, self._arrived, sent, received, "sums")

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
        places = (self._begins[by] + place for place in (part.dk, part.dv))
        dk, dv = (self._arrived[place : place + count] for place in places)
        return dk, dv


def _attend(
    call: Call,
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    options: Options,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out, and softmax_lse as (rows, nheads, 1), of the rows of a call."""
    inputs = q[call.rows], keys[0][call.keys], keys[1][call.keys]
    lengths, own = call.given(q.device, options)
    out, softmax_lse = run(schemas.forward_call(inputs, lengths, own, None, learnable_sink=sink))
    return out, softmax_lse.t()[..., None]


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


def _blank(
    local: Iterable[Call],
    part: Pass,
    like: torch.Tensor,
    shape: Sequence[int],
    fill: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns a tensor for results of all rows, filled unless calls write every row."""
    calls = (*local, *part.calls, *part.runs)
    written = sum(call.rows.stop - call.rows.start for call in calls)
    if part.rows is None and written == shape[0]:
        return like.new_empty([*shape], dtype=dtype)
    return like.new_full([*shape], fill, dtype=dtype)


def _write(targets: Iterable[torch.Tensor], where: slice, results: Iterable[torch.Tensor]) -> None:
    for target, result in zip(targets, results, strict=True):
        target[where] = result


def _joined(
    found: Sequence[tuple[slice, torch.Tensor]], like: torch.Tensor, total: int, fill: float = 0.0
) -> torch.Tensor:
    """Joins pieces of a tensor of `total` rows; one that is all of it is not copied.

    Args:
        found: where the pieces lie, and these.
        like: has dtype, heads and width of the tensor.
        total: its rows.
        fill: what is elsewhere.
    """
    if len(found) == 1 and found[0][0] == slice(0, total):
        return found[0][1]
    into = like.new_full((total, *like.shape[1:]), fill)
    for where, piece in found:
        into[where] = piece
    return into


def _sent(
    ranks: Ranks,
    way: Route,
    results: Sequence[torch.Tensor],
    targets: Sequence[Heads],
    what: str,
) -> Callable[[], None]:
    """Sends results back on the way on which their rows came, and returns what writes them."""
    heads = [Heads(one, 0, one.shape[1]) for one in results]
    return functools.partial(Arriving(ranks, way.back, heads, what).into, targets)


def _finish(going: Iterable[Callable[[], None]]) -> None:
    for end in going:
        end()


def _added(left: KeySums, right: KeySums) -> KeySums:
    return left[0] + right[0], left[1] + right[1]
