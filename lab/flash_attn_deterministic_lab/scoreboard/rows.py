"""The rows of the contract that apply to any function of q, k and v, and their cases.

Pages and packed sequences have no rows: NAME-served runs these through packed calls on pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

Attend = Callable[..., torch.Tensor]  # an attention, or one whose results are copied

Pair = tuple[torch.Tensor, torch.Tensor]
# Both sides of each comparison, after what is compared.
Pairs = Iterator[tuple[str, Pair]]


@dataclass(frozen=True)
class Sizes:
    """How large the problems are."""

    device: str  # "cpu" or "cuda"
    heads: tuple[tuple[int, int], ...]  # (nheads, nheads_k) to try
    head_dims: tuple[int, ...]  # to try
    seqlen: int  # of prefill and of caches
    batches: tuple[int, ...]  # sizes to compare a sequence alone with

    def shapes(self) -> list[Heads]:
        """Returns every combination of heads and head dim."""
        return [Heads(*heads, dim, self.device) for heads in self.heads for dim in self.head_dims]


CUDA = Sizes("cuda", ((16, 16), (16, 4)), (64, 128), 1500, (2, 7, 32))
QUICK_CUDA = Sizes("cuda", ((8, 2),), (128,), 1000, (2, 16))
CPU = Sizes("cpu", ((4, 2),), (32,), 150, (2, 3))


@dataclass(frozen=True)
class Heads:
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
        q = self.draw(batch, seqlen_q, self.nheads, 1)
        return [q, *(self.draw(batch, seqlen_k, self.nheads_k, seed) for seed in (2, 3))]


@dataclass(frozen=True)
class Row:
    """A promise."""

    id: str  # of the contract, or of a case from an issue
    promise: str  # what the bits must not depend on
    # Takes the attention, a shape, the length of the sizes and the numbers of a case; yields the
    # pairs that must have equal bits.
    run: Callable[..., Pairs]
    numbers: Callable[[Sizes], Iterable[tuple[int, ...]]]  # of the cases of each shape
    words: str  # the name of a case, with its numbers and L for the length of the sizes
    lengths: bool = False  # whether a call must take the lengths of its keys
    gradients: bool = False  # whether it needs a backward
    source: str = ""  # where the case was met; "" for rows of the contract
    shape: Heads | None = None  # the only one; None: those of the sizes

    def cases(self, attend: Attend, sizes: Sizes) -> Iterator[tuple[str, Pairs]]:
        """Yields the name of each case, and its pairs."""
        for shape in [self.shape] if self.shape else sizes.shapes():
            for numbers in self.numbers(sizes):
                name = f"{shape} {self.words.format(*numbers, L=sizes.seqlen)}"
                yield name, self.run(attend, shape, sizes.seqlen, *numbers)


def _run_to_run(attend: Attend, shape: Heads, seqlen: int, batch: int, seqlen_q: int) -> Pairs:
    inputs = shape.inputs(batch, seqlen_q, seqlen)
    first = attend(*inputs)
    for time in range(3):
        yield f"call {time + 2}", (attend(*inputs), first)


def _batch(attend: Attend, shape: Heads, seqlen: int, batch: int, seqlen_q: int) -> Pairs:
    causal = seqlen_q > 1
    inputs = shape.inputs(batch, seqlen_q, seqlen)
    together = attend(*inputs, causal=causal)
    for place in (0, batch - 1):
        alone = attend(*(t[place : place + 1] for t in inputs), causal=causal)
        yield f"sequence {place}", (together[place : place + 1], alone)


def _chunks(sizes: Sizes) -> Iterable[tuple[int, int]]:
    seqlen = sizes.seqlen
    return (0, 63), (seqlen // 2, seqlen - 1), (seqlen - 70, seqlen - 4)


def _chunk(attend: Attend, shape: Heads, seqlen: int, first: int, last: int) -> Pairs:
    q, k, v = shape.inputs(2, seqlen, seqlen)
    whole = attend(q, k, v, causal=True)
    part = attend(q[:, first : last + 1], k[:, : last + 1], v[:, : last + 1], causal=True)
    yield "rows", (part, whole[:, first : last + 1])


def _decode(attend: Attend, shape: Heads, seqlen: int, row: int) -> Pairs:
    q, k, v = shape.inputs(2, seqlen, seqlen)
    whole = attend(q, k, v, causal=True)
    step = attend(q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1])
    yield "row", (step, whole[:, row : row + 1])


def _capacity(attend: Attend, shape: Heads, seqlen: int, seqlen_q: int, room: int) -> Pairs:
    q, k, v = shape.inputs(2, seqlen_q, seqlen + room)
    lengths = torch.full((2,), seqlen, dtype=torch.int32, device=q.device)
    exact = attend(q, k[:, :seqlen], v[:, :seqlen], causal=True, seqlens_k=lengths)
    yield "rows", (attend(q, k, v, causal=True, seqlens_k=lengths), exact)


def _heads(attend: Attend, shape: Heads, seqlen: int, seqlen_q: int) -> Pairs:
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


def _backward_repeats(attend: Attend, shape: Heads, seqlen: int) -> Pairs:
    inputs = shape.inputs(4, seqlen, seqlen)
    dout = shape.draw(4, seqlen, shape.nheads, 4)
    first = _gradients(attend, inputs, dout)
    for time in range(3):
        again = _gradients(attend, inputs, dout)
        for (name, left), (_, right) in zip(again, first, strict=True):
            yield f"{name}, call {time + 2}", (left, right)


def _backward_batch(attend: Attend, shape: Heads, seqlen: int, batch: int, length: int) -> Pairs:
    inputs = shape.inputs(batch, length, length)
    dout = shape.draw(batch, length, shape.nheads, 4)
    alone = _gradients(attend, [t[:1] for t in inputs], dout[:1])
    together = _gradients(attend, inputs, dout)
    for (name, left), (_, right) in zip(together, alone, strict=True):
        yield name, (left[:1], right)


def _neighbour(attend: Attend, shape: Heads, seqlen: int, own: int) -> Pairs:
    outs = []
    q, k, v = shape.inputs(2, 1, max(own, 10))
    for neighbour in (9, 10):
        room = max(own, neighbour)
        lengths = torch.tensor([own, neighbour], dtype=torch.int32, device=q.device)
        outs.append(attend(q, k[:, :room], v[:, :room], seqlens_k=lengths)[:1])
    yield "its own row", (outs[0], outs[1])


def _one_against_more(attend: Attend, shape: Heads, seqlen: int, several: int) -> Pairs:
    q, k, v = shape.inputs(2, several, seqlen)
    together = attend(q, k, v, causal=True)
    own = seqlen - several + 1
    yield "the first query", (attend(q[:, :1], k[:, :own], v[:, :own]), together[:, :1])


def _tile_of_the_batch(attend: Attend, shape: Heads, seqlen: int, length: int, most: int) -> Pairs:
    inputs = shape.inputs(most, length, length)
    alone = attend(*(t[:1] for t in inputs), causal=True)
    batch = 2
    while batch <= most:
        together = attend(*(t[:batch] for t in inputs), causal=True)
        yield f"batch {batch}", (together[:1], alone)
        batch *= 2


def _cases(*numbers: tuple[int, ...]) -> Callable[[Sizes], Iterable[tuple[int, ...]]]:
    """The same cases whatever the sizes."""
    return lambda sizes: numbers


ROWS = (
    Row("run-to-run", "repeating the call", _run_to_run,
        lambda sizes: ((4, sizes.seqlen), (2, 1)), "B{} q{} k{L}"),
    Row("batch", "who else is in the batch (prefill)", _batch,
        lambda sizes: ((batch, sizes.seqlen) for batch in sizes.batches), "B{} q{} k{L}"),
    Row("decode-batch", "who else is in the batch (one query)", _batch,
        lambda sizes: ((batch, 1) for batch in sizes.batches), "B{} q{} k{L}"),
    Row("chunk", "how the queries are cut", _chunk, _chunks, "L{L} rows {}-{}"),
    Row("decode", "a row of a prefill, or one query over a cache", _decode,
        lambda sizes: ((15,), (sizes.seqlen // 2,), (sizes.seqlen - 1,)), "L{L} row {}"),
    Row("capacity", "room behind the sequence", _capacity,
        _cases((1, 64), (1, 1000), (20, 300)), "q{} k{L} room {}", lengths=True),
    Row("heads", "KV groups alone or together; shared or repeated keys", _heads,
        lambda sizes: ((sizes.seqlen,), (1,)), "q{} k{L}"),
    Row("backward", "repeating the backward", _backward_repeats, _cases(()), "B4 L{L}",
        gradients=True),
    Row("backward-batch", "who else is in the batch (gradients)", _backward_batch,
        lambda sizes: ((batch, sizes.seqlen) for batch in sizes.batches[:2]), "B{} L{}",
        gradients=True),
    Row("neighbour-9-10", "a neighbour that grows from 9 to 10 tokens", _neighbour,
        lambda sizes: ((9,), (sizes.seqlen,)), "{} keys beside 9, then 10", lengths=True,
        source="vllm #51902"),
    Row("one-or-k+1", "one query, or k more behind it", _one_against_more,
        _cases((2,), (5,), (8,)), "1 query or {}, {L} keys", source="vllm #54506"),
    Row("tile-of-batch", "a tile that follows the batch", _tile_of_the_batch,
        lambda sizes: ((seqlen, 64 if sizes.device == "cuda" else 8) for seqlen in (17, 130)),
        "L{} B1-{}", source="flashinfer #2424"),
    # Of batch * nheads * seqlen_q * seqlen_k * 2 bytes: 32 MiB a sequence.
    Row("workspace-256MB", "a workspace below or above 256 MB (gradients)", _backward_batch,
        lambda sizes: ((8, 1024), (9, 1024)) if sizes.device == "cuda" else (), "B{} L{}",
        gradients=True, source="cudnn-frontend #398", shape=Heads(16, 16, 128, "cuda")),
)  # fmt: skip
