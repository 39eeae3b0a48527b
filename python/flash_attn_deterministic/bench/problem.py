"""The shapes that are timed, and their tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """One thing to time."""

    kind: str  # "forward", "backward", "decode", or "step": a forward and its backward
    batch: int  # sequences
    seqlen: int  # keys of a sequence; of packed sequences the longest
    nheads: int  # query heads
    nheads_k: int  # key heads
    head_dim: int
    causal: bool = False  # whether the mask is causal, aligned to the bottom right corner
    dtype: str = "bf16"  # "bf16" or "fp16"
    seqlen_q: int = 0  # queries of a sequence; 0: as many as keys, in a decode one
    window: int = -1  # keys before its own that a query sees, in a causal shape; -1: all
    lengths: tuple[int, ...] = ()  # of packed sequences; empty: dense

    @property
    def name(self) -> str:
        """Returns e.g. "decode B8 L4096 H32/8 D128 bf16"."""
        if self.lengths:
            length = f"L{min(self.lengths)}..{self.seqlen}"
        else:
            length = f"Lq{self.seqlen_q} Lk{self.seqlen}" if self.seqlen_q else f"L{self.seqlen}"
        heads = f"H{self.nheads}" + (f"/{self.nheads_k}" if self.nheads_k != self.nheads else "")
        words = [self.kind, f"B{self.batch}", length, heads, f"D{self.head_dim}"]
        words += ["causal"] * self.causal + [f"window {self.window}"] * (self.window >= 0)
        return " ".join([*words, self.dtype])

    @property
    def queries(self) -> int:
        """Returns the queries of a sequence."""
        return self.seqlen_q or (1 if self.kind == "decode" else self.seqlen)

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of the matrix products on visible keys."""
        products = {"backward": 5, "step": 7}.get(self.kind, 2)
        pairs = sum(
            _visible(self.queries if not self.lengths else length, length, self.causal, self.window)
            for length in self.lengths or [self.seqlen] * self.batch
        )
        return 2 * products * self.nheads * self.head_dim * pairs


def _visible(seqlen_q: int, seqlen_k: int, causal: bool, window: int) -> int:
    """Returns the pairs of a query and a key that it sees."""
    own = torch.arange(seqlen_q) + seqlen_k - seqlen_q  # the key in a query's own place
    last = own.clamp(max=seqlen_k - 1) if causal else torch.full_like(own, seqlen_k - 1)
    first = (own - window).clamp(min=0) if window >= 0 else torch.zeros_like(own)
    return int((last - first + 1).clamp(min=0).sum())


_CUDA = (
    Shape("forward", 8, 4096, 32, 32, 64),
    Shape("forward", 8, 4096, 32, 8, 128, causal=True),
    Shape("forward", 2, 16_384, 16, 16, 128, causal=True),
    Shape("decode", 1, 4096, 32, 8, 128),
    Shape("decode", 8, 4096, 32, 8, 128),
    Shape("decode", 64, 4096, 32, 8, 128),
    Shape("decode", 8, 32_768, 32, 8, 128),
    Shape("backward", 8, 4096, 32, 32, 64, causal=True),
    Shape("backward", 4, 4096, 16, 16, 128),
)
_CPU = (
    Shape("forward", 1, 128, 4, 2, 64, causal=True),
    Shape("decode", 2, 256, 4, 2, 64),
    Shape("backward", 1, 128, 2, 2, 64),
)


def shapes(device: str, kinds: tuple[str, ...]) -> list[Shape]:
    """Returns what is timed on a device, in order of kinds."""
    known = _CUDA if device == "cuda" else _CPU
    return [shape for kind in kinds for shape in known if shape.kind == kind]


@dataclass(frozen=True)
class Problem:
    """A shape with random tensors."""

    shape: Shape  # what to time
    # (batch, queries, nheads, head_dim), or packed (total_q, nheads, head_dim)
    q: torch.Tensor = field(repr=False)
    # (batch, seqlen, nheads_k, head_dim), or packed (total_k, nheads_k, head_dim)
    k: torch.Tensor = field(repr=False)
    v: torch.Tensor = field(repr=False)  # like k
    dout: torch.Tensor = field(repr=False)  # like q
    # (batch + 1,), int32: where packed sequences begin; None: dense
    cu_seqlens: torch.Tensor | None = field(default=None, repr=False)

    @staticmethod
    def draw(shape: Shape, device: str) -> Problem:
        """Draws the tensors; the same ones each time."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(seqlen: int, nheads: int) -> torch.Tensor:
            rows = (sum(shape.lengths),) if shape.lengths else (shape.batch, seqlen)
            drawn = torch.randn((*rows, nheads, shape.head_dim), generator=generator, device=device)
            return drawn.to(DTYPES[shape.dtype]).requires_grad_(shape.kind in ("backward", "step"))

        q = normal(shape.queries, shape.nheads)
        k, v = (normal(shape.seqlen, shape.nheads_k) for _ in range(2))
        dout = normal(shape.queries, shape.nheads).detach()
        if not shape.lengths:
            return Problem(shape, q, k, v, dout)
        starts = torch.tensor([0, *itertools.accumulate(shape.lengths)], dtype=torch.int32)
        return Problem(shape, q, k, v, dout, starts.to(device))
