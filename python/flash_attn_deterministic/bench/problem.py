"""The shapes that are timed, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """One thing to time.

    Args:
        kind: "forward", "backward" or "decode".
        batch: sequences.
        seqlen: keys of a sequence; queries too, but for decode, which has one.
        nheads: query heads.
        nheads_k: key heads.
        head_dim: theirs.
        causal: whether the mask is causal.
        dtype: "bf16" or "fp16".
    """

    kind: str
    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    head_dim: int
    causal: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Returns e.g. "decode B8 L4096 H32/8 D128 bf16"."""
        heads = f"H{self.nheads}" + (f"/{self.nheads_k}" if self.nheads_k != self.nheads else "")
        mask = " causal" if self.causal else ""
        sizes = f"B{self.batch} L{self.seqlen} {heads} D{self.head_dim}"
        return f"{self.kind} {sizes}{mask} {self.dtype}"


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
    """A shape with random tensors, (batch, seqlen, nheads, head_dim) each."""

    shape: Shape
    q: torch.Tensor = field(repr=False)
    k: torch.Tensor = field(repr=False)
    v: torch.Tensor = field(repr=False)
    dout: torch.Tensor = field(repr=False)

    @staticmethod
    def draw(shape: Shape, device: str) -> Problem:
        """Draws the tensors; the same ones each time."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(seqlen: int, nheads: int) -> torch.Tensor:
            size = (shape.batch, seqlen, nheads, shape.head_dim)
            drawn = torch.randn(size, generator=generator, device=device)
            return drawn.to(DTYPES[shape.dtype]).requires_grad_(shape.kind == "backward")

        seqlen_q = 1 if shape.kind == "decode" else shape.seqlen
        q = normal(seqlen_q, shape.nheads)
        k, v = (normal(shape.seqlen, shape.nheads_k) for _ in range(2))
        return Problem(shape, q, k, v, normal(seqlen_q, shape.nheads).detach())
