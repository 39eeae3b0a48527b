"""The rows of the contract that one function of q, k and v can be asked for, and named cases.

Pages and packed sequences have no common interface; those rows are left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .attention import Attend

Pair = tuple[torch.Tensor, torch.Tensor]
# Both sides of each comparison, after what is compared.
Pairs = Iterator[tuple[str, Pair]]
Run = Callable[[Attend], Pairs]


@dataclass(frozen=True)
class Sizes:
    """How large the problems are.

    Args:
        device: "cpu" or "cuda".
        heads: (nheads, nheads_k) to try.
        head_dims: to try.
        seqlen: of prefill and of caches.
        batches: sizes to compare a sequence alone with.
    """

    device: str
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...]
    seqlen: int
    batches: tuple[int, ...]


CUDA = Sizes("cuda", ((16, 16), (16, 4)), (64, 128), 1500, (2, 7, 32))
QUICK_CUDA = Sizes("cuda", ((8, 2),), (128,), 1000, (2, 16))
CPU = Sizes("cpu", ((4, 2),), (32,), 150, (2, 3))


@dataclass(frozen=True)
class Case:
    """One thing to try.

    Args:
        name: of its numbers.
        run: gives the pairs that must have equal bits.
    """

    name: str
    run: Run


@dataclass(frozen=True)
class Row:
    """A promise.

    Args:
        id: of the contract, or of the case that somebody ran into.
        promise: what the bits must not depend on.
        cases: for the sizes of a run.
        lengths: whether a call must take the lengths of its keys.
        gradients: whether it needs a backward.
        source: where the case was met; "" for rows of the contract.
    """

    id: str
    promise: str
    cases: Callable[[Sizes], Iterator[Case]]
    lengths: bool = False
    gradients: bool = False
    source: str = ""


@dataclass(frozen=True)
class Shape:
    """Heads, head dim and device of a problem."""

    nheads: int
    nheads_k: int
    head_dim: int
    device: str

    def __str__(self) -> str:
        return f"H{self.nheads}/{self.nheads_k} D{self.head_dim}"

    def draw(self, batch: int, seqlen: int, nheads: int, seed: int) -> torch.Tensor:
        """Returns (batch, seqlen, nheads, head_dim) normal numbers in bfloat16."""
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (batch, seqlen, nheads, self.head_dim)
        drawn = torch.randn(size, generator=generator, device=self.device)
        return drawn.to(torch.bfloat16)

    def inputs(self, batch: int, seqlen_q: int, seqlen_k: int) -> list[torch.Tensor]:
        """Returns q, k and v."""
        return [
            self.draw(batch, seqlen_q, self.nheads, 1),
            self.draw(batch, seqlen_k, self.nheads_k, 2),
            self.draw(batch, seqlen_k, self.nheads_k, 3),
        ]


def _shapes(sizes: Sizes) -> Iterator[Shape]:
    for nheads, nheads_k in sizes.heads:
        for head_dim in sizes.head_dims:
            yield Shape(nheads, nheads_k, head_dim, sizes.device)


def _run_to_run(sizes: Sizes) -> Iterator[Case]:
    for shape in _shapes(sizes):
        for batch, seqlen_q in ((4, sizes.seqlen), (2, 1)):

            def run(
                attend: Attend, shape: Shape = shape, batch: int = batch, n: int = seqlen_q
            ) -> Pairs:
                inputs = shape.inputs(batch, n, sizes.seqlen)
                first = attend(*inputs)
                for time in range(3):
                    yield f"call {time + 2}", (attend(*inputs), first)

            yield Case(f"{shape} B{batch} q{seqlen_q} k{sizes.seqlen}", run)


def _batch_of(sizes: Sizes, seqlen_q: int, causal: bool) -> Iterator[Case]:
    for shape in _shapes(sizes):
        for batch in sizes.batches:

            def run(attend: Attend, shape: Shape = shape, batch: int = batch) -> Pairs:
                inputs = shape.inputs(batch, seqlen_q, sizes.seqlen)
                together = attend(*inputs, causal=causal)
                for place in (0, batch - 1):
                    alone = attend(*(t[place : place + 1] for t in inputs), causal=causal)
                    yield f"sequence {place}", (together[place : place + 1], alone)

            yield Case(f"{shape} B{batch} q{seqlen_q} k{sizes.seqlen}", run)


def _batch(sizes: Sizes) -> Iterator[Case]:
    yield from _batch_of(sizes, sizes.seqlen, True)


def _decode_batch(sizes: Sizes) -> Iterator[Case]:
    yield from _batch_of(sizes, 1, False)


def _chunk(sizes: Sizes) -> Iterator[Case]:
    seqlen = sizes.seqlen
    for shape in _shapes(sizes):
        for begin, end in ((0, 64), (seqlen // 2, seqlen), (seqlen - 70, seqlen - 3)):

            def run(
                attend: Attend, shape: Shape = shape, begin: int = begin, end: int = end
            ) -> Pairs:
                q, k, v = shape.inputs(2, seqlen, seqlen)
                whole = attend(q, k, v, causal=True)
                part = attend(q[:, begin:end], k[:, :end], v[:, :end], causal=True)
                yield "rows", (part, whole[:, begin:end])

            yield Case(f"{shape} L{seqlen} rows {begin}-{end - 1}", run)


def _decode(sizes: Sizes) -> Iterator[Case]:
    seqlen = sizes.seqlen
    for shape in _shapes(sizes):
        for row in (15, seqlen // 2, seqlen - 1):

            def run(attend: Attend, shape: Shape = shape, row: int = row) -> Pairs:
                q, k, v = shape.inputs(2, seqlen, seqlen)
                whole = attend(q, k, v, causal=True)
                step = attend(q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1])
                yield "row", (step, whole[:, row : row + 1])

            yield Case(f"{shape} L{seqlen} row {row}", run)


def _one_against_more(sizes: Sizes) -> Iterator[Case]:
    seqlen = sizes.seqlen
    for shape in _shapes(sizes):
        for more in (1, 4, 7):

            def run(attend: Attend, shape: Shape = shape, more: int = more) -> Pairs:
                q, k, v = shape.inputs(2, 1 + more, seqlen)
                several = attend(q, k, v, causal=True)
                own = seqlen - more
                one = attend(q[:, :1], k[:, :own], v[:, :own])
                yield "the first query", (one, several[:, :1])

            yield Case(f"{shape} 1 query or {1 + more}, {seqlen} keys", run)


def _tile_of_the_batch(sizes: Sizes) -> Iterator[Case]:
    most = 64 if sizes.device == "cuda" else 8
    for shape in _shapes(sizes):
        for seqlen in (17, 130):

            def run(attend: Attend, shape: Shape = shape, seqlen: int = seqlen) -> Pairs:
                inputs = shape.inputs(most, seqlen, seqlen)
                alone = attend(*(t[:1] for t in inputs), causal=True)
                batch = 2
                while batch <= most:
                    together = attend(*(t[:batch] for t in inputs), causal=True)
                    yield f"batch {batch}", (together[:1], alone)
                    batch *= 2

            yield Case(f"{shape} L{seqlen} B1-{most}", run)


def _capacity(sizes: Sizes) -> Iterator[Case]:
    for shape in _shapes(sizes):
        for seqlen_q, room in ((1, 64), (1, 1000), (20, 300)):

            def run(
                attend: Attend, shape: Shape = shape, n: int = seqlen_q, room: int = room
            ) -> Pairs:
                q, k, v = shape.inputs(2, n, sizes.seqlen + room)
                own = sizes.seqlen
                lengths = torch.full((2,), own, dtype=torch.int32, device=q.device)
                exact = attend(q, k[:, :own], v[:, :own], causal=True, seqlens_k=lengths)
                roomy = attend(q, k, v, causal=True, seqlens_k=lengths)
                yield "rows", (roomy, exact)

            yield Case(f"{shape} q{seqlen_q} k{sizes.seqlen} room {room}", run)


def _neighbour(sizes: Sizes) -> Iterator[Case]:
    for shape in _shapes(sizes):
        for own in (9, sizes.seqlen):

            def run(attend: Attend, shape: Shape = shape, own: int = own) -> Pairs:
                outs = []
                q, k, v = shape.inputs(2, 1, max(own, 10))
                for neighbour in (9, 10):
                    room = max(own, neighbour)
                    lengths = torch.tensor([own, neighbour], dtype=torch.int32, device=q.device)
                    out = attend(q, k[:, :room], v[:, :room], seqlens_k=lengths)
                    outs.append(out[:1])
                yield "its own row", (outs[0], outs[1])

            yield Case(f"{shape} {own} keys beside 9, then 10", run)


def _heads(sizes: Sizes) -> Iterator[Case]:
    for shape in _shapes(sizes):
        for seqlen_q in (sizes.seqlen, 1):

            def run(attend: Attend, shape: Shape = shape, n: int = seqlen_q) -> Pairs:
                q, k, v = shape.inputs(2, n, sizes.seqlen)
                group = shape.nheads // shape.nheads_k
                whole = attend(q, k, v)
                last = attend(q[:, :, -group:], k[:, :, -1:], v[:, :, -1:])
                yield "the last KV group alone", (last, whole[:, :, -group:])
                if group > 1:
                    repeated = [t.repeat_interleave(group, 2) for t in (k, v)]
                    yield "GQA and repeated keys", (whole, attend(q, *repeated))

            yield Case(f"{shape} q{seqlen_q} k{sizes.seqlen}", run)


def _gradients(
    attend: Attend, inputs: list[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves, causal=True)
    return list(torch.autograd.grad(out, leaves, dout))


_GRADIENTS = ("dq", "dk", "dv")


def _backward_repeats(sizes: Sizes) -> Iterator[Case]:
    for shape in _shapes(sizes):

        def run(attend: Attend, shape: Shape = shape) -> Pairs:
            inputs = shape.inputs(4, sizes.seqlen, sizes.seqlen)
            dout = shape.draw(4, sizes.seqlen, shape.nheads, 4)
            first = _gradients(attend, inputs, dout)
            for time in range(3):
                again = _gradients(attend, inputs, dout)
                for name, left, right in zip(_GRADIENTS, again, first, strict=True):
                    yield f"{name}, call {time + 2}", (left, right)

        yield Case(f"{shape} B4 L{sizes.seqlen}", run)


def _backward_in_batches(shape: Shape, seqlen: int, batches: tuple[int, ...]) -> Iterator[Case]:
    for batch in batches:

        def run(attend: Attend, batch: int = batch) -> Pairs:
            inputs = shape.inputs(batch, seqlen, seqlen)
            dout = shape.draw(batch, seqlen, shape.nheads, 4)
            alone = _gradients(attend, [t[:1] for t in inputs], dout[:1])
            together = _gradients(attend, inputs, dout)
            for name, left, right in zip(_GRADIENTS, together, alone, strict=True):
                yield name, (left[:1], right)

        yield Case(f"{shape} B{batch} L{seqlen}", run)


def _backward_batch(sizes: Sizes) -> Iterator[Case]:
    for shape in _shapes(sizes):
        yield from _backward_in_batches(shape, sizes.seqlen, sizes.batches[:2])


def _workspace(sizes: Sizes) -> Iterator[Case]:
    """A workspace of batch * nheads * seqlen_q * seqlen_k * 2 bytes: 32 MiB a sequence."""
    if sizes.device == "cuda":
        yield from _backward_in_batches(Shape(16, 16, 128, "cuda"), 1024, (8, 9))


ROWS = (
    Row("run-to-run", "repeating the call", _run_to_run),
    Row("batch", "who else is in the batch (prefill)", _batch),
    Row("decode-batch", "who else is in the batch (one query)", _decode_batch),
    Row("chunk", "how the queries are cut", _chunk),
    Row("decode", "a row of a prefill, or one query over a cache", _decode),
    Row("capacity", "room behind the sequence", _capacity, lengths=True),
    Row("heads", "KV groups alone or together; shared or repeated keys", _heads),
    Row("backward", "repeating the backward", _backward_repeats, gradients=True),
    Row("backward-batch", "who else is in the batch (gradients)", _backward_batch, gradients=True),
    Row(
        "neighbour-9-10",
        "a neighbour that grows from 9 to 10 tokens",
        _neighbour,
        lengths=True,
        source="vllm #51902",
    ),
    Row(
        "one-or-k+1",
        "one query, or k more behind it",
        _one_against_more,
        source="vllm #54506",
    ),
    Row(
        "tile-of-batch",
        "a tile that follows the batch",
        _tile_of_the_batch,
        source="flashinfer #2424",
    ),
    Row(
        "workspace-256MB",
        "a workspace below or above 256 MB (gradients)",
        _workspace,
        gradients=True,
        source="cudnn-frontend #398",
    ),
)
