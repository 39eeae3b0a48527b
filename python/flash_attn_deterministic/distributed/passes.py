"""Forward and backward of one rank: attention ops, and messages between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import schemas
from ..ops.autograd import run
from ..types import Gradients, Options
from .exchange import Arriving, Heads, Route, Stream, heads_of, stream_of
from .plan import Call, Pass, Plan
from .ranks import Ranks
from .sums import Sums, added

# A piece of a result, and where it is.
Piece = tuple[slice, torch.Tensor]


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

    def rows(self, tensors: Iterable[Heads]) -> list[Heads]:
        """Returns the query heads of each part of tensors with all of them."""
        first, count = self.head * self.group, self.size * self.group
        return [one.some(first, count) for one in tensors]

    def keys(self, tensors: Iterable[Heads]) -> list[Heads]:
        """Returns the KV heads likewise."""
        return [one.some(self.head, self.size) for one in tensors]


class _Steps:
    """The steps of a pass: the messages of the next one travel while one is computed.

    Results of a step travel while the next one is computed, and are written then. `part` is of this
    rank; `keys` are tensors (tokens, nheads_k, ...) that come, `rows` (tokens, nheads, ...) those
    that do unless rows stay.
    """

    def __init__(
        self,
        ranks: Ranks,
        stream: Stream,
        degree: int,
        part: Pass,
        rows: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
    ) -> None:
        self._ranks, self._stream, self._part, self._own = ranks, stream, part, rows
        each = keys[0].shape[1] // degree
        self._first, self._each = ranks.rank % degree * each, each
        self._group = rows[0].shape[1] // keys[0].shape[1]
        # What ends a step, once the next one has been computed.
        self.later: list[Callable[[], None]] = []
        self._coming = None
        # Whether rows stay, and one step has all heads.
        self.are_one = part.rows is None and (part.keys is None or part.heads >= each)
        if part.keys is not None:
            # What is sent, once for all steps.
            self._keys = [heads_of(one, degree) for one in keys]
            self._rows = [] if part.rows is None else [heads_of(one, degree) for one in rows]
            self._coming = self._start(0)

    def _start(self, head: int) -> tuple[_Step, list[Arriving]] | None:
        if head >= self._each:
            return None
        part = self._part
        step = _Step(self._first, head, min(part.heads, self._each - head), self._group)
        rows, keys = step.rows(self._rows), step.keys(self._keys)
        sent = [(part.keys, keys), (part.rows, rows)]
        if part.rows is part.keys:  # on the same way: one message
            sent = [(part.keys, keys + rows)]
        return step, [
            Arriving(self._ranks, way, tensors, self._stream, "rows and keys")
            for way, tensors in sent
            if way is not None
        ]

    def __iter__(self) -> Iterator[tuple[_Step, Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
        """Yields each step, with the rows of its heads, whether they came or not, and keys."""
        while self._coming is not None:
            before, self.later = self.later, []
            step, arriving = self._coming
            found = [tensor for message in arriving for tensor in message.new()]
            if self._part.rows is None:
                found += self._own if self.are_one else (one[:, step.of_rows] for one in self._own)
            self._coming = self._start(step.head + step.size)
            keys, rows = found[:2], found[2:]
            del found, arriving
            yield step, rows, keys
            while before:  # nothing keeps what is written, and its memory
                before.pop(0)()
        while self.later:
            self.later.pop(0)()

    def send_back(
        self, way: Route, results: Sequence[torch.Tensor], targets: Sequence[Heads], what: str
    ) -> None:
        """Sends results on the way on which their rows came, and later writes those that come."""
        heads = [heads_of(one, 1) for one in results]
        arriving = Arriving(self._ranks, way.back, heads, self._stream, what)
        self.later.append(functools.partial(arriving.into, targets))


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

    q, k and v have this rank's tokens, (tokens, nheads or nheads_k, head_dim). Options are those of
    the call; each op has a window of its own. learnable_sink is (nheads,), float32; each row sees
    it once, with all its keys.

    Returns out like q, and softmax_lse (nheads, tokens of q); 0 and +inf in rows of no sequence.
    """
    part, stream = plan.forward, stream_of(q.device)
    degree = plan.chosen.ulysses_degree
    steps = _Steps(ranks, stream, degree, part, (q,), (k, v))
    # While the first keys come, sequences that need none.
    found = _attend(plan.local, q, (k, v), stream, options, learnable_sink)
    if steps.are_one:
        for _, (rows,), keys in steps:
            found += _attend(part.calls, rows, keys, stream, options, learnable_sink)
        return _results(found, q)
    out, lse = _results(found, q, part.calls if part.rows is None else ())
    targets: tuple[Heads, ...] = ()
    if part.rows is not None:
        lse = lse.t().contiguous()  # it travels by rows
        targets = heads_of(out, degree), heads_of(lse[..., None], degree)
        lse = lse.t()
    for step, (rows,), keys in steps:
        sink = None if learnable_sink is None else learnable_sink[step.of_rows]
        found = _attend(part.calls, rows, keys, stream, options, sink)
        if part.rows is None:
            _write([(where, one) for where, one, _ in found], out[:, step.of_rows])
            _write([(where, one) for where, _, one in found], lse[step.of_rows], 1)
            continue
        results, of_results = _results(found, rows)
        sent = results, of_results.t()[..., None]
        steps.send_back(part.rows, sent, step.rows(targets), "results")
    return out, lse


def backward(
    ranks: Ranks, plan: Plan, rows: Rows, k: torch.Tensor, v: torch.Tensor, options: Options
) -> Gradients:
    """Computes dq, dk and dv of this rank, like its q, k and v; 0 for tokens of no sequence.

    Arguments are as in `forward`; rows are those of this rank.
    """
    part, stream = plan.backward, stream_of(k.device)
    degree = plan.chosen.ulysses_degree
    of_rows = rows[:3] if part.rows is None else (*rows[:3], rows.softmax_lse.t()[..., None])
    steps = _Steps(ranks, stream, degree, part, of_rows, (k, v))
    local = [(call, _gradients(call, rows, (k, v), stream, options)) for call in plan.local]
    of_dq = [(call.rows, one[0]) for call, one in local]
    dq, dk, dv = rows.q, k, v
    if part.keys is None or not steps.are_one:
        later = (*part.calls, *part.runs) if part.rows is None else ()
        dq = _joined(of_dq, dq, later)
    # Whether the sums of one step are all of dk and dv.
    only_sums = steps.are_one and part.whole is None
    only_sums &= part.sums is not None and part.sums.keys == (slice(0, k.shape[0]),)
    if not only_sums:
        dk, dv = (
            _joined([(call.keys, one[side]) for call, one in local], like)
            for side, like in ((1, k), (2, v))
        )
    targets_q = [] if part.rows is None else [heads_of(dq, degree)]
    targets_k = [] if part.whole is None else [heads_of(one, degree) for one in (dk, dv)]
    del local
    for step, (dout, q, out, *lse), keys in steps:
        here = Rows(dout, q, out, lse[0][..., 0].t() if lse else rows.softmax_lse[step.of_rows])
        whole = [_gradients(call, here, keys, stream, options) for call in part.calls]
        runs = [_gradients(call, here, keys, stream, options, sums=True) for call in part.runs]
        calls = zip((*part.calls, *part.runs), (*whole, *runs), strict=True)
        found = [(call.rows, one[0]) for call, one in calls]
        moving: dict[Route, tuple[list[torch.Tensor], list[Heads]]] = {}
        if steps.are_one:
            dq = _joined([*of_dq, *found], rows.q)
        elif part.rows is None:
            _write(found, dq[:, step.of_rows])
        else:
            moving[part.rows] = [_joined(found, q)], step.rows(targets_q)
        if part.whole is not None:
            results, targets = moving.setdefault(part.whole, ([], []))  # same way: one message
            like = keys[0][: part.whole.room]
            for side in (1, 2):
                pairs = zip(part.calls, whole, strict=True)
                results.append(_joined([(call.keys, one[side]) for call, one in pairs], like))
            targets += step.keys(targets_k)
        for way, both in moving.items():
            steps.send_back(way, *both, "gradients")
        del whole, found, moving
        if part.sums is not None:
            found_sums = [one[1:] for one in runs]
            sums = _Adding(ranks, part.sums, step.size, found_sums, k, options)
            if only_sums:
                dk, dv = sums.finished()
            else:
                steps.later.append(functools.partial(sums.write, dk, dv, degree, step.head))
    return dq, dk, dv


class _Adding:
    """Sums of dk and dv of a step: those of this rank's runs, and those on their way to it.

    `found` has for each run the sums of dk, without softmax_scale, and of dv, for all keys of its
    call: (keys, heads of the step, head_dim), float32. k is of this rank, all heads.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Sums,
        heads: int,
        found: Sequence[Sequence[torch.Tensor]],
        k: torch.Tensor,
        options: Options,
    ) -> None:
        self._plan, self._found, self._k, self._options = plan, found, k, options
        sent, received = plan.counts
        shape = sum(received), heads, k.shape[2]
        self._arrived = torch.empty(shape, dtype=torch.float32, device=k.device)
        data = [found[run][side][keys] for run, keys in plan.sent for side in (0, 1)]
        message = torch.cat([self._arrived[:0], *data])
        self._pending = ranks.all_to_all(message, self._arrived, sent, received, "sums")

    def finished(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns dk and dv of each part of heads, one after another, once sums have arrived."""
        self._pending.wait()
        total = added(self._plan, self._arrived, self._found)
        sums = total.view(2, -1, *total.shape[1:])
        scores = self._options.softmax_scale, self._options.softcap, 0.0
        given = *sums, self._k[:, : total.shape[1]], *scores
        found: tuple[torch.Tensor, torch.Tensor] = run(("finish_key_sums", given))
        return found

    def write(self, dk: torch.Tensor, dv: torch.Tensor, degree: int, head: int) -> None:
        """Writes dk and dv, from a head of each part of the heads on."""
        if not self._plan.keys:
            self._pending.wait()
            return
        for target, found in zip((dk, dv), self.finished(), strict=True):
            parts = target.view(target.shape[0], degree, -1, target.shape[2])
            of_parts = found.view(degree, -1, *found.shape[1:]).transpose(0, 1)
            size, row = found.shape[1], 0
            for keys in self._plan.keys:
                count = keys.stop - keys.start
                parts[keys, :, head : head + size] = of_parts[row : row + count]
                row += count


def _attend(
    calls: Iterable[Call],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    stream: Stream,
    options: Options,
    sink: torch.Tensor | None,
) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Returns the rows of each call, their out, and softmax_lse (nheads, rows)."""
    found = []
    for call in calls:
        inputs = q[call.rows], keys[0][call.keys], keys[1][call.keys]
        lengths, own = call.given(stream, options)
        results = run(schemas.forward_call(inputs, lengths, own, None, learnable_sink=sink))
        found.append((call.rows, *results))
    return found


def _gradients(
    call: Call,
    rows: Rows,
    keys: Sequence[torch.Tensor],
    stream: Stream,
    options: Options,
    sums: bool = False,
) -> Gradients:
    """Computes dq, dk and dv of a call, rounded; with sums, dq and the sums of dk and dv."""
    dout, q, out = (one[call.rows] for one in rows[:3])
    inputs = q, keys[0][call.keys], keys[1][call.keys]
    lengths, own = call.given(stream, options)
    lse = rows.softmax_lse[:, call.rows].contiguous()
    gradients: Gradients = run(
        schemas.backward_call(dout, inputs, out, lse, lengths, own, None, None, sums)
    )
    return gradients


def _results(
    found: Sequence[tuple[slice, torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    later: Iterable[Call] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins out and softmax_lse (nheads, rows) of rows like q; see `_joined`."""
    out = _joined([(where, one) for where, one, _ in found], q, later)
    return out, _joined([(where, one) for where, _, one in found], q, later, is_lse=True)


def _joined(
    found: Sequence[Piece], like: torch.Tensor, later: Iterable[Call] = (), is_lse: bool = False
) -> torch.Tensor:
    """Joins pieces of a result like `like`; one that is all of it is not copied. Others are 0.

    `later` are calls that write more rows. With `is_lse` the result is softmax_lse of rows like
    these, (nheads, rows), float32, and other rows are +inf.
    """
    shape: tuple[int, ...] = like.shape
    dtype, dim, fill = like.dtype, 0, 0.0
    if is_lse:
        shape, dtype, dim, fill = (shape[1], shape[0]), torch.float32, 1, math.inf
    written = [(call.rows, like) for call in later]
    if found and not written:
        pieces = _all_of(found, shape[dim])
        if pieces:
            return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim)
    if written and _all_of([*found, *written], shape[dim]):
        into = like.new_empty(shape, dtype=dtype)
    else:
        into = like.new_full(shape, fill, dtype=dtype)
    _write(found, into, dim)
    return into


def _write(found: Sequence[Piece], into: torch.Tensor, dim: int = 0) -> None:
    """Writes pieces of a dimension."""
    # Into heads of a tensor, torch's cat would write piece by piece, too.
    if into.is_contiguous() and (pieces := _all_of(found, into.shape[dim])):
        torch.cat(pieces, dim, out=into)
        return
    for where, piece in found:
        into.narrow(dim, where.start, where.stop - where.start).copy_(piece)


def _all_of(found: Sequence[Piece], size: int) -> list[torch.Tensor]:
    """Returns pieces in order if they are all of a dimension, otherwise none."""
    pieces, row = [], 0
    for where, piece in sorted(found, key=lambda one: one[0].start):
        if where.start != row:
            return []
        pieces.append(piece)
        row = where.stop
    return pieces if row == size else []
