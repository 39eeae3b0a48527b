"""Forward and backward of one rank: attention ops, and messages between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import schemas, tree
from ..ops.autograd import run
from ..types import Gradients, Lengths, Options

# Defines the ops.
from ..ops import library as library  # isort: skip
from . import exchange
from .exchange import Arriving, Item
from .plan import Call, Pass, Plan
from .ranks import Ranks

# Sums of dk, without softmax_scale, and of dv over some rows: (keys, nheads_k, head_dim), float32.
KeySums = tuple[torch.Tensor, torch.Tensor]


class Numbers(NamedTuple):
    """The numbers of attention, but for the mask.

    Args:
        softmax_scale: factor of q k^T.
        softcap: 0.0: none.
        split_size: tokens per split; 0: one split.
        deterministic: whether the forward is.
        deterministic_bwd: whether the backward is.
    """

    softmax_scale: float
    softcap: float
    split_size: int
    deterministic: bool
    deterministic_bwd: bool

    def options(self, call: Call) -> Options:
        """Returns what the op of a call takes."""
        scores = self.softmax_scale, *call.mask, self.softcap
        return Options(0.0, *scores, self.split_size, self.deterministic, self.deterministic_bwd)


class Rows(NamedTuple):
    """Rows with their results: (rows, nheads, head_dim), and softmax_lse (rows, nheads)."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor

    def of(self, call: Call) -> Rows:
        """Returns the rows of a call."""
        return Rows(*(tensor[call.rows] for tensor in self))


class Heads:
    """The heads of each step, on each rank.

    Args:
        plan: of the call.
        nheads: query heads.
        nheads_k: KV heads.
        rank: this one.
    """

    def __init__(self, plan: Plan, nheads: int, nheads_k: int, rank: int) -> None:
        self.group = nheads // nheads_k
        self._degree, self._rank = plan.degree, rank
        self.each = nheads_k // plan.degree

    def steps(self, at_once: int) -> list[slice]:
        """Cuts a rank's KV heads into steps, counted from its first one."""
        return [slice(h, min(h + at_once, self.each)) for h in range(0, self.each, at_once)]

    def of_keys(self, step: slice, rank: int | None = None) -> slice:
        """Returns the KV heads that a rank (this one) computes in a step."""
        first = (self._rank if rank is None else rank) % self._degree * self.each
        return slice(first + step.start, first + step.stop)

    def of_rows(self, step: slice, rank: int | None = None) -> slice:
        """Returns the query heads likewise."""
        keys = self.of_keys(step, rank)
        return slice(keys.start * self.group, keys.stop * self.group)

    def travelling(
        self,
        part: Pass,
        step: slice,
        rows: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
    ) -> list[Item]:
        """Returns what comes before a step: rows, unless they stay, and keys."""
        count = step.stop - step.start
        items = []
        if part.rows is not None:
            sent = functools.partial(self.of_rows, step)
            items += [Item(part.rows, tensor, count * self.group, sent) for tensor in rows]
        if part.keys is not None:
            sent = functools.partial(self.of_keys, step)
            items += [Item(part.keys, tensor, count, sent) for tensor in keys]
        return items


def forward(
    ranks: Ranks,
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    numbers: Numbers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of this rank's rows.

    Args:
        ranks: over which the sequences are distributed.
        plan: of the call.
        q: (tokens of q on this rank, nheads, head_dim).
        k: (tokens of k on this rank, nheads_k, head_dim).
        v: like k.
        numbers: of the call.

    Returns:
        out like q, and softmax_lse (tokens of q, nheads) in the computing dtype; 0 and +inf in rows
        of no sequence.
    """
    part, heads = plan.forward, Heads(plan, q.shape[1], k.shape[1], ranks.rank)
    out, softmax_lse = _no_rows(q, q.shape[0], q.shape[1])

    def attend(calls: Sequence[Call], rows: Sequence[torch.Tensor], keys: KeySums) -> None:
        mine, here, lse = rows
        for call in calls:
            here[call.rows], lse[call.rows] = _forward_call(
                mine[call.rows], keys[0][call.keys], keys[1][call.keys], call, numbers
            )

    steps = _Steps(ranks, heads, part, (q,), (k, v))
    attend(plan.local, (q, out, softmax_lse), (k, v))
    for step, came in steps:
        keys = came[-2], came[-1]
        if part.rows is None:
            at = slice(None), heads.of_rows(step)
            attend(part.calls, [one[at] for one in (q, out, softmax_lse)], keys)
            continue
        count = (step.stop - step.start) * heads.group
        results = _no_rows(q, part.rows.room, count)
        attend(part.calls, (came[0], *results), keys)
        placed = functools.partial(heads.of_rows, step)
        targets = (out, softmax_lse[..., None])
        steps.send(
            [
                Item(part.rows.back, one, count, into=into, placed=placed)
                for one, into in zip((results[0], results[1][..., None]), targets, strict=True)
            ]
        )
    return out, softmax_lse


def backward(
    ranks: Ranks, plan: Plan, rows: Rows, k: torch.Tensor, v: torch.Tensor, numbers: Numbers
) -> Gradients:
    """Computes the gradients of this rank's q, k and v.

    Args:
        ranks: as in `forward`; plan, k, v and numbers too.
        plan: see ranks.
        rows: of this rank, with their results.
        k: see ranks.
        v: see ranks.
        numbers: see ranks.

    Returns:
        dq, dk and dv, like q, k and v; 0 for tokens of no sequence.
    """
    part, heads = plan.backward, Heads(plan, rows.q.shape[1], k.shape[1], ranks.rank)
    dq, dk, dv = (one.new_zeros(one.shape) for one in (rows.q, k, v))
    of_rows = rows.dout, rows.q, rows.out, rows.softmax_lse[..., None]
    steps = _Steps(ranks, heads, part, of_rows, (k, v))
    for call in plan.local:
        dq[call.rows], dk[call.keys], dv[call.keys] = _backward_call(
            rows.of(call), k[call.keys], v[call.keys], call, numbers
        )
    for step, came in steps:
        *mine, keys, values = came
        count, of_query = step.stop - step.start, heads.of_rows(step)
        here, into = Rows(*(one[:, of_query] for one in rows)), dq[:, of_query]
        if part.rows is not None:
            dout, q, out, lse = mine
            here = Rows(dout, q, out, lse[..., 0])
            into = torch.zeros_like(here.q)
        gradients = [keys.new_zeros((part.whole_room, *keys.shape[1:])) for _ in range(2)]
        for call in part.calls:
            into[call.rows], gradients[0][call.keys], gradients[1][call.keys] = _backward_call(
                here.of(call), keys[call.keys], values[call.keys], call, numbers
            )
        shape = part.sums_sent, *keys.shape[1:]
        sums = [keys.new_empty(shape, dtype=_of_sums(k)) for _ in range(2)]
        for run_ in part.runs:
            call = run_.call
            into[call.rows], *found = _backward_call(
                here.of(call), keys[call.keys], values[call.keys], call, numbers, sums=True
            )
            for one, some in zip(sums, found, strict=True):
                one[run_.place] = some[run_.keys]
        items, then = [], None
        if part.rows is not None:
            placed = functools.partial(heads.of_rows, step)
            items.append(Item(part.rows.back, into, count * heads.group, into=dq, placed=placed))
        if part.whole is not None:
            placed = functools.partial(heads.of_keys, step)
            items += [
                Item(part.whole, one, count, into=whole, placed=placed)
                for one, whole in zip(gradients, (dk, dv), strict=True)
            ]
        if part.sums is not None:
            arriving = _Sums(part, plan.degree, count, sums, heads.each, step)
            items += arriving.items
            then = functools.partial(arriving.add_up, numbers, dk, dv)
        del came, mine, keys, values, here
        steps.send(items, then)
    return dq, dk, dv


class _Sums:
    """Sums of dk and dv of a step, on their way to the ranks of the keys."""

    def __init__(
        self,
        part: Pass,
        degree: int,
        count: int,
        sent: Sequence[torch.Tensor],
        each: int,
        step: slice,
    ) -> None:
        assert part.sums is not None
        self._arrivals, self._degree, self._each, self._step = part.arrivals, degree, each, step
        shape = part.sums.room, degree * count, sent[0].shape[2]
        # What no row sees has no sum, and counts as 0.
        self._into = [one.new_zeros(shape) for one in sent]

        def placed(rank: int) -> slice:
            return slice(rank % degree * count, (rank % degree + 1) * count)

        self.items = [
            Item(part.sums, one, count, into=into, placed=placed)
            for one, into in zip(sent, self._into, strict=True)
        ]

    def add_up(self, numbers: Numbers, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Writes dk and dv, once the sums have arrived."""
        for keys, chunks, places in self._arrivals:
            count = keys.stop - keys.start
            first, second = self._into
            sums = {node: (first[at : at + count], second[at : at + count]) for node, at in places}
            total = tree.add_up(sums, chunks, _added)
            assert total is not None
            for into, one in zip(
                (dk, dv), _finish(total, dk[:, : first.shape[1]], numbers), strict=True
            ):
                by_rank = into[keys].view(count, self._degree, self._each, -1)
                by_rank[:, :, self._step] = one.view(count, self._degree, -1, one.shape[2])


class _Steps:
    """The steps of a pass, with its messages: some heads come while others are computed.

    All ranks start the same messages in the same order.

    Args:
        ranks: the ranks.
        heads: of the steps.
        part: of this rank.
        rows: tensors that come unless rows stay.
        keys: tensors that come.
    """

    def __init__(
        self,
        ranks: Ranks,
        heads: Heads,
        part: Pass,
        rows: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
    ) -> None:
        self._ranks, self._going = ranks, _NOTHING
        steps = [] if part.keys is None else heads.steps(part.heads)
        self._waiting = [(one, heads.travelling(part, one, rows, keys)) for one in steps]
        self._coming: list[tuple[slice, Arriving]] = []
        self._start()

    def _start(self) -> None:
        if self._waiting:
            step, items = self._waiting.pop(0)
            self._coming.append((step, exchange.start(self._ranks, items, "rows and keys")))

    def __iter__(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        while self._coming:
            step, arriving = self._coming.pop()
            came = arriving.wait()
            self._start()
            yield step, came
            del came
        self._arrive()

    def send(self, items: Sequence[Item], then: Callable[[], None] | None = None) -> None:
        """Sends results to their ranks, and waits for those of the step before.

        Args:
            items: the results.
            then: is called once they have arrived.
        """
        sent = exchange.start(self._ranks, items, "results")
        self._arrive()
        self._going = sent, then

    def _arrive(self) -> None:
        (arriving, then), self._going = self._going, _NOTHING
        if arriving is not None:
            arriving.wait()
        if then is not None:
            then()


_NOTHING: tuple[Arriving | None, Callable[[], None] | None] = (None, None)


def _no_rows(q: torch.Tensor, rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and softmax_lse (rows, heads) of rows that see no key."""
    out = q.new_zeros((rows, heads, q.shape[2]))
    return out, out.new_full(out.shape[:2], math.inf, dtype=_of_sums(q))


def _of_sums(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _added(left: KeySums, right: KeySums) -> KeySums:
    return left[0] + right[0], left[1] + right[1]


def _forward_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, numbers: Numbers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out (rows, nheads, head_dim) and softmax_lse (rows, nheads) of a call."""
    lengths = _lengths(call, q.device)
    out, softmax_lse = run(schemas.forward_call((q, k, v), lengths, numbers.options(call), None))
    return out, softmax_lse.transpose(0, 1)


def _backward_call(
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    numbers: Numbers,
    sums: bool = False,
) -> Gradients:
    """Computes dq, dk and dv of a call, rounded; with sums, dq and the sums of dk and dv."""
    dout, q, out, softmax_lse = rows
    lse = softmax_lse.transpose(0, 1).contiguous()
    lengths, options = _lengths(call, k.device), numbers.options(call)
    gradients: Gradients = run(
        schemas.backward_call(dout, (q, k, v), out, lse, lengths, options, None, None, sums)
    )
    return gradients


def _finish(sums: KeySums, k: torch.Tensor, numbers: Numbers) -> KeySums:
    """Returns dk and dv, rounded to the dtype of k, from the sums over all rows."""
    dk, dv = torch.ops.flash_attn_deterministic.finish_key_sums(
        *(total.contiguous() for total in sums), k, numbers.softmax_scale, numbers.softcap, 0.0
    )
    return dk, dv


def _lengths(call: Call, device: torch.device) -> Lengths:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    starts_q = _on_device(call.starts_q, device, stream)
    return Lengths(starts_q, _on_device(call.starts_k, device, stream), *call.longest)


# Cached, as each copy to a GPU makes the host wait for earlier kernels. One tensor for each stream:
# the allocator reuses memory in the order of the stream that allocated it.
@functools.lru_cache(maxsize=256)
def _on_device(starts: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32, device=device)
