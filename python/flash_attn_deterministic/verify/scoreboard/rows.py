"""The rows of the contract that one function of q, k and v can be asked for, and named cases.

Pages and packed sequences have no common interface; those rows are left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .attention import Attend

Pair = tuple[torch.Tensor, torch.Tensor]
# Both sides of each comparison, after what is compared.
Pairs = Iterator[tuple[str, Pair]]
Numbers = tuple[int, ...]


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

    def shapes(self) -> list[Shape]:
        """Returns every combination of heads and head dim."""
        return [Shape(*heads, dim, self.device) for heads in self.heads for dim in self.head_dims]


CUDA = Sizes("cuda", ((16, 16), (16, 4)), (64, 128), 1500, (2, 7, 32))
QUICK_CUDA = Sizes("cuda", ((8, 2),), (128,), 1000, (2, 16))
CPU = Sizes("cpu", ((4, 2),), (32,), 150, (2, 3))


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


@dataclass(frozen=True)
class Case:
    """One thing to try.

    Args:
        name: of its numbers.
        run: gives the pairs that must have equal bits.
    """

    name: str
    run: Callable[[Attend], Pairs]


@dataclass(frozen=True)
class Row:
    """A promise.

    Args:
        id: of the contract, or of the case that somebody ran into.
        promise: what the bits must not depend on.
        run: called with the attention, a shape, the length of the sizes and the numbers of one
            case; gives the pairs that must have equal bits.
        numbers: of the cases of each shape, for the sizes of a run.
        words: the name of a case, with its numbers and L for the length of the sizes.
        lengths: whether a call must take the lengths of its keys.
        gradients: whether it needs a backward.
        source: where the case was met; "" for rows of the contract.
        shape: the only one; None: those of the sizes.
    """

    id: str
    promise: str
    run: Callable[..., Pairs]
    numbers: Callable[[Sizes], Iterable[Numbers]]
    words: str
    lengths: bool = False
    gradients: bool = False
    source: str = ""
    shape: Shape | None = None

    def cases(self, sizes: Sizes) -> Iterator[Case]:
        """Yields the cases of a run."""
        shapes = [self.shape] if self.shape else sizes.shapes()
        for shape in shapes:
            for numbers in self.numbers(sizes):
                name = f"{shape} {self.words.format(*numbers, L=sizes.seqlen)}"
                run = partial(self.run, shape=shape, seqlen=sizes.seqlen, numbers=numbers)
                yield Case(name, run)


def _run_to_run(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    batch, seqlen_q = numbers
    inputs = shape.inputs(batch, seqlen_q, seqlen)
    first = attend(*inputs)
    for time in range(3):
        yield f"call {time + 2}", (attend(*inputs), first)


def _batch(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    batch, seqlen_q = numbers
    causal = seqlen_q > 1
    inputs = shape.inputs(batch, seqlen_q, seqlen)
    together = attend(*inputs, causal=causal)
    for place in (0, batch - 1):
        alone = attend(*(t[place : place + 1] for t in inputs), causal=causal)
        yield f"sequence {place}", (together[place : place + 1], alone)


def _chunk(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    first, last = numbers
    q, k, v = shape.inputs(2, seqlen, seqlen)
    whole = attend(q, k, v, causal=True)
    part = attend(q[:, first : last + 1], k[:, : last + 1], v[:, : last + 1], causal=True)
    yield "rows", (part, whole[:, first : last + 1])


def _decode(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    (row,) = numbers
    q, k, v = shape.inputs(2, seqlen, seqlen)
    whole = attend(q, k, v, causal=True)
    step = attend(q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1])
    yield "row", (step, whole[:, row : row + 1])


def _one_against_more(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    (several,) = numbers
    q, k, v = shape.inputs(2, several, seqlen)
    together = attend(q, k, v, causal=True)
    own = seqlen - several + 1
    yield "the first query", (attend(q[:, :1], k[:, :own], v[:, :own]), together[:, :1])


def _tile_of_the_batch(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    length, most = numbers
    inputs = shape.inputs(most, length, length)
    alone = attend(*(t[:1] for t in inputs), causal=True)
    batch = 2
    while batch <= most:
        together = attend(*(t[:batch] for t in inputs), causal=True)
        yield f"batch {batch}", (together[:1], alone)
        batch *= 2


def _capacity(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    seqlen_q, room = numbers
    q, k, v = shape.inputs(2, seqlen_q, seqlen + room)
    lengths = torch.full((2,), seqlen, dtype=torch.int32, device=q.device)
    exact = attend(q, k[:, :seqlen], v[:, :seqlen], causal=True, seqlens_k=lengths)
    yield "rows", (attend(q, k, v, causal=True, seqlens_k=lengths), exact)


def _neighbour(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    (own,) = numbers
    outs = []
    q, k, v = shape.inputs(2, 1, max(own, 10))
    for neighbour in (9, 10):
        room = max(own, neighbour)
        lengths = torch.tensor([own, neighbour], dtype=torch.int32, device=q.device)
        outs.append(attend(q, k[:, :room], v[:, :room], seqlens_k=lengths)[:1])
    yield "its own row", (outs[0], outs[1])


def _heads(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    (seqlen_q,) = numbers
    q, k, v = shape.inputs(2, seqlen_q, seqlen)
    group = shape.nheads // shape.nheads_k
    whole = attend(q, k, v)
    last = attend(q[:, :, -group:], k[:, :, -1:], v[:, :, -1:])
    yield "the last KV group alone", (last, whole[:, :, -group:])
    if group > 1:
        repeated = [t.repeat_interleave(group, 2) for t in (k, v)]
        yield "GQA and repeated keys", (whole, attend(q, *repeated))


def _gradients(
    attend: Attend, inputs: list[torch.Tensor], dout: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves, causal=True)
    return list(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))


def _backward_repeats(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    inputs = shape.inputs(4, seqlen, seqlen)
    dout = shape.draw(4, seqlen, shape.nheads, 4)
    first = _gradients(attend, inputs, dout)
    for time in range(3):
        again = _gradients(attend, inputs, dout)
        for (name, left), (_, right) in zip(again, first, strict=True):
            yield f"{name}, call {time + 2}", (left, right)


def _backward_batch(attend: Attend, shape: Shape, seqlen: int, numbers: Numbers) -> Pairs:
    batch, length = numbers
    inputs = shape.inputs(batch, length, length)
    dout = shape.draw(batch, length, shape.nheads, 4)
    alone = _gradients(attend, [t[:1] for t in inputs], dout[:1])
    together = _gradients(attend, inputs, dout)
    for (name, left), (_, right) in zip(together, alone, strict=True):
        yield name, (left[:1], right)


ROWS = (
    Row(
        "run-to-run",
        "repeating the call",
        _run_to_run,
        lambda sizes: ((4, sizes.seqlen), (2, 1)),
        "B{} q{} k{L}",
    ),
    Row(
        "batch",
        "who else is in the batch (prefill)",
        _batch,
        lambda sizes: ((batch, sizes.seqlen) for batch in sizes.batches),
        "B{} q{} k{L}",
    ),
    Row(
        "decode-batch",
        "who else is in the batch (one query)",
        _batch,
        lambda sizes: ((batch, 1) for batch in sizes.batches),
        "B{} q{} k{L}",
    ),
    Row(
        "chunk",
        "how the queries are cut",
        _chunk,
        lambda sizes: (
            (0, 63),
            (sizes.seqlen // 2, sizes.seqlen - 1),
            (sizes.seqlen - 70, sizes.seqlen - 4),
        ),
        "L{L} rows {}-{}",
    ),
    Row(
        "decode",
        "a row of a prefill, or one query over a cache",
        _decode,
        lambda sizes: ((15,), (sizes.seqlen // 2,), (sizes.seqlen - 1,)),
        "L{L} row {}",
    ),
    Row(
        "capacity",
        "room behind the sequence",
        _capacity,
        lambda sizes: ((1, 64), (1, 1000), (20, 300)),
        "q{} k{L} room {}",
        lengths=True,
    ),
    Row(
        "heads",
        "KV groups alone or together; shared or repeated keys",
        _heads,
        lambda sizes: ((sizes.seqlen,), (1,)),
        "q{} k{L}",
    ),
    Row(
        "backward",
        "repeating the backward",
        _backward_repeats,
        lambda sizes: ((),),
        "B4 L{L}",
        gradients=True,
    ),
    Row(
        "backward-batch",
        "who else is in the batch (gradients)",
        _backward_batch,
        lambda sizes: ((batch, sizes.seqlen) for batch in sizes.batches[:2]),
        "B{} L{}",
        gradients=True,
    ),
    Row(
        "neighbour-9-10",
        "a neighbour that grows from 9 to 10 tokens",
        _neighbour,
        lambda sizes: ((9,), (sizes.seqlen,)),
        "{} keys beside 9, then 10",
        lengths=True,
        source="vllm #51902",
    ),
    Row(
        "one-or-k+1",
        "one query, or k more behind it",
        _one_against_more,
        lambda sizes: ((2,), (5,), (8,)),
        "1 query or {}, {L} keys",
        source="vllm #54506",
    ),
    Row(
        "tile-of-batch",
        "a tile that follows the batch",
        _tile_of_the_batch,
        lambda sizes: ((seqlen, 64 if sizes.device == "cuda" else 8) for seqlen in (17, 130)),
        "L{} B1-{}",
        source="flashinfer #2424",
    ),
    Row(
        "workspace-256MB",
        "a workspace below or above 256 MB (gradients)",
        _backward_batch,
        # Of batch * nheads * seqlen_q * seqlen_k * 2 bytes: 32 MiB a sequence.
        lambda sizes: ((8, 1024), (9, 1024)) if sizes.device == "cuda" else (),
        "B{} L{}",
        gradients=True,
        source="cudnn-frontend #398",
        shape=Shape(16, 16, 128, "cuda"),
    ),
)
