"""Shapes at which prefill and backward are timed beside the fastest kernels for Hopper, bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flash_attn_deterministic.bench.problem import Shape

from tests.benchmarks.shared.cases import ragged

HEAD_DIMS = (64, 96, 128, 192, 256)
SIXTEEN = ragged(16, 256, 8192)  # 587 to 8184
SIXTY_FOUR = ragged(64, 1, 8192)  # 19 to 8087
_MASKS = (False, True)


@dataclass(frozen=True)
class Case:
    """A shape, and the group that it is summed up in."""

    group: str
    shape: Shape

    @property
    def name(self) -> str:
        """Returns the shape's."""
        return self.shape.name


def _dense(
    kind: str, sizes: tuple[tuple[int, int, int], ...], head_dims: tuple[int, ...]
) -> Iterator[Shape]:
    """Shapes of (batch, seqlen, nheads), full and causal, at each head dim."""
    for head_dim in head_dims:
        for batch, seqlen, nheads in sizes:
            for causal in _MASKS:
                yield Shape(kind, batch, seqlen, nheads, nheads, head_dim, causal)


def _packed(
    kind: str, lengths: tuple[int, ...], nheads: int, nheads_k: int, head_dim: int, causal: bool
) -> Shape:
    return Shape(
        kind, len(lengths), max(lengths), nheads, nheads_k, head_dim, causal, lengths=lengths
    )


def _window(kind: str, shape: tuple[int, int, int, int, int], window: int) -> Shape:
    return Shape(kind, *shape, causal=True, window=window)


def _forward() -> Iterator[Case]:
    kind = "forward"
    # batch, seqlen, nheads; 65,536 tokens come last, for their time.
    for shape in _dense(kind, ((32, 512, 16), (4, 4096, 16), (1, 16_384, 16)), HEAD_DIMS):
        yield Case("dense", shape)
    for shape in _dense(kind, ((8, 4096, 32), (16, 1024, 16), (2, 16_384, 16)), (64, 128)):
        yield Case("dense", shape)
    yield Case("dense", Shape(kind, 3, 5000, 24, 24, 128, True))
    for causal in _MASKS:
        for batch, seqlen in ((64, 512), (8, 2048), (8, 4096), (2, 16_384)):
            yield Case("GQA", Shape(kind, batch, seqlen, 32, 8, 128, causal))
        yield Case("GQA", Shape(kind, 8, 4096, 32, 8, 64, causal))
    yield Case("GQA", Shape(kind, 1, 65_536, 8, 2, 128, True))
    for causal in _MASKS:
        for head_dim in HEAD_DIMS:
            yield Case("packed", _packed(kind, SIXTEEN, 16, 16, head_dim, causal))
        for heads in ((32, 8, 128), (16, 16, 128), (32, 32, 64)):
            yield Case("packed", _packed(kind, SIXTY_FOUR, *heads, causal))
    for window in (128, 256, 512, 1024, 2048, 4096):
        yield Case("window", _window(kind, (2, 16_384, 32, 8, 128), window))
    for window in (128, 1024, 4096):
        yield Case("window", _window(kind, (2, 16_384, 16, 16, 64), window))
    for head_dim in (96, 128, 192, 256):
        yield Case("window", _window(kind, (4, 4096, 16, 16, head_dim), 1024))
    for queries in (512, 2048):
        for seqlen in (8192, 16_384, 32_768, 65_536, 131_072):
            yield Case("chunk", Shape(kind, 1, seqlen, 32, 8, 128, True, seqlen_q=queries))
        yield Case("chunk", Shape(kind, 4, 32_768, 32, 8, 128, True, seqlen_q=queries))
        yield Case("chunk", Shape(kind, 1, 32_768, 32, 8, 64, True, seqlen_q=queries))
    # Image tokens to 77 tokens of text, speech, and text to long documents.
    for shape in (
        Shape(kind, 16, 77, 20, 20, 64, seqlen_q=1024),
        Shape(kind, 16, 77, 10, 10, 64, seqlen_q=4096),
        Shape(kind, 16, 1500, 20, 20, 64, seqlen_q=448),
        Shape(kind, 8, 4096, 16, 16, 128, seqlen_q=512),
    ):
        yield Case("cross attention", shape)
    for shape in (
        Shape(kind, 64, 577, 16, 16, 64),
        Shape(kind, 64, 197, 12, 12, 64),
        Shape(kind, 256, 257, 16, 16, 64),
        Shape(kind, 32, 729, 16, 16, 72),
        Shape(kind, 16, 1025, 16, 16, 80),
    ):
        yield Case("ViT", shape)
    for shape in _dense(kind, ((1, 65_536, 4),), HEAD_DIMS):
        yield Case("dense, 65,536 tokens", shape)


def _backward() -> Iterator[Case]:
    kind = "backward"
    yield Case("training step", Shape("step", 8, 4096, 32, 8, 128, True))
    # From 4 heads of all sequences (further down) to 256.
    for shape in _dense(kind, ((16, 512, 16), (4, 4096, 16), (1, 16_384, 16)), (64, 96, 128)):
        yield Case("dense", shape)
    for shape in _dense(kind, ((8, 4096, 32), (1, 8192, 4)), (64, 128)):
        yield Case("dense", shape)
    yield Case("dense", Shape(kind, 3, 5000, 24, 24, 128, True))
    yield Case("dense", Shape(kind, 2, 16_384, 16, 16, 64, True))
    yield Case("dense", Shape(kind, 32, 512, 16, 16, 64, True))
    for causal in _MASKS:
        for batch, seqlen in ((8, 512), (8, 4096), (2, 16_384)):
            yield Case("GQA", Shape(kind, batch, seqlen, 32, 8, 128, causal))
        yield Case("GQA", Shape(kind, 8, 4096, 32, 8, 64, causal))
    yield Case("GQA", Shape(kind, 1, 65_536, 8, 2, 128, True))
    for causal in _MASKS:
        for head_dim in (64, 96, 128):
            yield Case("packed", _packed(kind, SIXTEEN, 16, 16, head_dim, causal))
        yield Case("packed", _packed(kind, SIXTY_FOUR, 32, 8, 128, causal))
    for window in (128, 1024, 4096):
        yield Case("window", _window(kind, (2, 16_384, 32, 8, 128), window))
    yield Case("window", _window(kind, (4, 4096, 16, 16, 64), 1024))
    for shape in _dense(kind, ((4, 4096, 16),), (192, 256)):
        yield Case("head dims 192, 256", shape)
    for shape in _dense(kind, ((1, 65_536, 4),), (64, 96, 128)):
        yield Case("dense, 65,536 tokens", shape)


FORWARD = tuple(_forward())
BACKWARD = tuple(_backward())
