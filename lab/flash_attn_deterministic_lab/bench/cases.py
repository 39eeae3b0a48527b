"""The studies: which shapes are timed with which attentions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .problem import FEATURES, Shape


@dataclass(frozen=True)
class Case:
    """A shape, and the group that it is summed up in."""

    group: str
    shape: Shape


@dataclass(frozen=True)
class Study:
    """Cases, and what they are timed with beside ours."""

    words: str
    cases: tuple[Case, ...]
    attentions: tuple[str, ...]  # names; empty: all that `bench` times unasked
    # Of which "best" is the fastest in each case.
    rivals: tuple[str, ...] = ()


def ragged(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Draws the lengths of packed sequences, the same ones each time."""
    numbers = random.Random(0)
    return tuple(numbers.randint(shortest, longest) for _ in range(batch))


_MASKS = (False, True)
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_WIDE = (64, 96, 128, 192, 256)  # that others have kernels for
_FEATURE_HEADS = ((32, 32, 64), (32, 8, 128))
SIXTEEN = ragged(16, 256, 8192)
SIXTY_FOUR = ragged(64, 1, 8192)
_CPU = (
    Case("forward", Shape("forward", 1, 128, 4, 2, 64, causal=True)),
    Case("decode", Shape("decode", 2, 256, 4, 2, 64)),
    Case("backward", Shape("backward", 1, 128, 2, 2, 64)),
)
_USUAL = (
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


def _dense(
    kind: str, sizes: Iterable[tuple[int, int, int]], head_dims: Iterable[int]
) -> Iterator[Case]:
    """Shapes of (batch, seqlen, nheads), full and causal, at each head dim."""
    for head_dim, size, causal in itertools.product(head_dims, tuple(sizes), _MASKS):
        batch, seqlen, nheads = size
        yield Case("dense", Shape(kind, batch, seqlen, nheads, nheads, head_dim, causal))


def _packed(
    kind: str, lengths: tuple[int, ...], heads: Iterable[tuple[int, int, int]]
) -> Iterator[Case]:
    for one, causal in itertools.product(heads, _MASKS):
        shape = Shape(kind, len(lengths), max(lengths), *one, causal, lengths=lengths)
        yield Case("packed", shape)


def _training(kind: str) -> Iterator[Case]:
    """What is timed beside FlashAttention-2: each head dim, short sequences, each feature."""
    yield from _dense(kind, [(4, 4096, 32)], (32,))
    yield from _dense(kind, [(8, 4096, 32)], (64, 128))
    yield from _dense(kind, [(4, 4096, 16)], (96, 192, 256))
    for sizes in ((4, 2048, 32, 32, 64), (2, 16_384, 16, 16, 128), (8, 4096, 32, 8, 128),
                  (8, 4096, 32, 1, 128), (64, 512, 32, 8, 128)):  # fmt: skip
        yield Case("dense", Shape(kind, *sizes, causal=True))
    for case in _dense(kind, [(256, 128, 16), (64, 512, 16), (32, 1024, 16)], _HEAD_DIMS):
        if case.shape.causal or case.shape.head_dim in (64, 128):
            yield case
    for feature, (nheads, nheads_k, dim) in itertools.product(FEATURES[1:], _FEATURE_HEADS):
        causal = feature != "window"  # which has no causal mask besides
        yield Case(feature, Shape(kind, 4, 4096, nheads, nheads_k, dim, causal, feature=feature))
    for nheads, nheads_k, dim in _FEATURE_HEADS:
        yield Case("window", Shape(kind, 2, 16_384, nheads, nheads_k, dim, feature="window"))
    for head_dim in (64, 128):
        yield Case("dense", Shape(kind, 8, 4096, 32, 32, head_dim, True, "fp16"))
    yield from _packed(kind, SIXTEEN, [(16, 16, 128)])
    if kind == "forward":
        yield from _packed(kind, SIXTY_FOUR, [(32, 8, 128), (16, 16, 128), (32, 32, 64)])


def _decode() -> Iterator[Case]:
    """Decode of one and of several queries, and from pages."""
    # batch, seqlen_q, seqlen, nheads, nheads_k, head_dim, page size
    for batch, queries, seqlen, nheads, nheads_k, head_dim, page in (
        (1, 1, 4096, 32, 8, 128, 0), (8, 1, 4096, 32, 8, 128, 0), (64, 1, 4096, 32, 8, 128, 0),
        (1, 1, 32_768, 32, 8, 128, 0), (8, 1, 32_768, 32, 8, 128, 0),
        (64, 1, 16_384, 32, 8, 128, 0), (1, 1, 131_072, 32, 8, 128, 0),
        (256, 1, 2048, 32, 8, 128, 0), (8, 1, 8192, 32, 1, 128, 0), (64, 1, 8192, 32, 1, 128, 0),
        (8, 1, 8192, 32, 8, 64, 0), (64, 1, 4096, 32, 8, 64, 0), (16, 1, 4096, 16, 2, 256, 0),
        (3, 1, 777, 40, 8, 128, 0), (1, 1, 100_000, 8, 1, 128, 0), (64, 1, 4096, 64, 8, 128, 0),
        (17, 1, 9000, 32, 8, 128, 0), (128, 1, 1500, 16, 16, 64, 0), (4, 1, 8192, 64, 2, 128, 0),
        (8, 5, 4096, 32, 8, 128, 0), (32, 2, 8192, 32, 8, 128, 0), (4, 16, 32_768, 32, 8, 128, 0),
        (1, 4, 8192, 32, 8, 128, 0), (2, 5, 4096, 32, 8, 128, 0), (4, 5, 4096, 32, 8, 128, 0),
        (8, 5, 4096, 32, 8, 64, 0), (8, 1, 3000, 32, 8, 128, 16), (1, 1, 20_000, 32, 8, 128, 256),
        (32, 1, 6000, 32, 8, 128, 16), (64, 1, 2000, 28, 4, 128, 64),
    ):  # fmt: skip
        group = "pages" if page else "one query" if queries == 1 else "several queries"
        sizes = (batch, seqlen, nheads, nheads_k, head_dim)
        shape = Shape("decode", *sizes, causal=True, page_size=page)
        yield Case(group, replace(shape, seqlen_q=queries if queries > 1 else 0))


def _peers_forward() -> Iterator[Case]:
    """Prefill beside the fastest kernels for Hopper."""
    kind = "forward"
    yield from _dense(kind, [(32, 512, 16), (4, 4096, 16), (1, 16_384, 16)], _WIDE)
    yield from _dense(kind, [(8, 4096, 32), (16, 1024, 16), (2, 16_384, 16)], (64, 128))
    yield Case("dense", Shape(kind, 3, 5000, 24, 24, 128, True))
    yield from _grouped(kind, ((64, 512), (8, 2048), (8, 4096), (2, 16_384)))
    yield from _packed(kind, SIXTEEN, [(16, 16, head_dim) for head_dim in _WIDE])
    yield from _packed(kind, SIXTY_FOUR, [(32, 8, 128), (16, 16, 128), (32, 32, 64)])
    yield from _windows(kind, (128, 256, 512, 1024, 2048, 4096), (2, 16_384, 32, 8, 128))
    yield from _windows(kind, (128, 1024, 4096), (2, 16_384, 16, 16, 64))
    for head_dim in (96, 128, 192, 256):
        yield from _windows(kind, (1024,), (4, 4096, 16, 16, head_dim))
    for queries in (512, 2048):
        for batch, seqlen, head_dim in (
            (1, 8192, 128), (1, 16_384, 128), (1, 32_768, 128), (1, 65_536, 128),
            (1, 131_072, 128), (4, 32_768, 128), (1, 32_768, 64),
        ):  # fmt: skip
            shape = Shape(kind, batch, seqlen, 32, 8, head_dim, True, seqlen_q=queries)
            yield Case("chunk", shape)
    # Image tokens to 77 tokens of text, speech, and text to long documents.
    for batch, queries, seqlen, nheads, head_dim in (
        (16, 1024, 77, 20, 64), (16, 4096, 77, 10, 64), (16, 448, 1500, 20, 64),
        (8, 512, 4096, 16, 128),
    ):  # fmt: skip
        shape = Shape(kind, batch, seqlen, nheads, nheads, head_dim, seqlen_q=queries)
        yield Case("cross attention", shape)
    for batch, seqlen, nheads, head_dim in (
        (64, 577, 16, 64), (64, 197, 12, 64), (256, 257, 16, 64), (32, 729, 16, 72),
        (16, 1025, 16, 80),
    ):  # fmt: skip
        yield Case("ViT", Shape(kind, batch, seqlen, nheads, nheads, head_dim))
    for case in _dense(kind, [(1, 65_536, 4)], _WIDE):  # last, for their time
        yield replace(case, group="dense, 65,536 tokens")


def _peers_backward() -> Iterator[Case]:
    """The backward beside the fastest kernels for Hopper."""
    kind = "backward"
    yield Case("training step", Shape("step", 8, 4096, 32, 8, 128, True))
    # From 4 heads of all sequences to 256.
    yield from _dense(kind, [(16, 512, 16), (4, 4096, 16), (1, 16_384, 16)], (64, 96, 128))
    yield from _dense(kind, [(8, 4096, 32), (1, 8192, 4)], (64, 128))
    for batch, seqlen, nheads, head_dim in (
        (3, 5000, 24, 128), (2, 16_384, 16, 64), (32, 512, 16, 64)
    ):  # fmt: skip
        yield Case("dense", Shape(kind, batch, seqlen, nheads, nheads, head_dim, True))
    yield from _grouped(kind, ((8, 512), (8, 4096), (2, 16_384)))
    yield from _packed(kind, SIXTEEN, [(16, 16, head_dim) for head_dim in (64, 96, 128)])
    yield from _packed(kind, SIXTY_FOUR, [(32, 8, 128)])
    yield from _windows(kind, (128, 1024, 4096), (2, 16_384, 32, 8, 128))
    yield from _windows(kind, (1024,), (4, 4096, 16, 16, 64))
    for case in _dense(kind, [(4, 4096, 16)], (192, 256)):
        yield replace(case, group="head dims 192, 256")
    for case in _dense(kind, [(1, 65_536, 4)], (64, 96, 128)):
        yield replace(case, group="dense, 65,536 tokens")


def _grouped(kind: str, sizes: Iterable[tuple[int, int]]) -> Iterator[Case]:
    for (batch, seqlen), causal in itertools.product(tuple(sizes), _MASKS):
        yield Case("GQA", Shape(kind, batch, seqlen, 32, 8, 128, causal))
    for causal in _MASKS:
        yield Case("GQA", Shape(kind, 8, 4096, 32, 8, 64, causal))
    yield Case("GQA", Shape(kind, 1, 65_536, 8, 2, 128, True))


def _windows(
    kind: str, windows: Iterable[int], sizes: tuple[int, int, int, int, int]
) -> Iterator[Case]:
    for window in windows:
        yield Case("window", Shape(kind, *sizes, causal=True, window=window))


_TORCH = ("sdpa-cudnn", "sdpa-flash")
_FORWARD, _BACKWARD = tuple(_training("forward")), tuple(_training("backward"))
STUDIES = {
    "usual": Study("nine shapes of prefill, decode and backward",
                   tuple(Case(shape.kind, shape) for shape in _USUAL), ()),
    "cpu": Study("three small shapes, for a machine without a GPU", _CPU, ()),
    "forward": Study("prefill beside FlashAttention-2", _FORWARD, ("flash_attn", "sdpa-flash")),
    "backward": Study("backward beside FlashAttention-2", _BACKWARD,
                      ("ours-atomics", "flash_attn", "flash_attn-deterministic", "sdpa-flash")),
    "decode": Study("decode, by CUDA graphs over caches larger than the L2 cache",
                    tuple(_decode()), ("flash_attn", "fa3", "fa3-one-split", "read")),
    "peers-forward": Study("prefill beside the fastest kernels for Hopper",
                           tuple(_peers_forward()), ("fa4", "fa3-one-split", "fa3", *_TORCH),
                           ("fa4", "fa3-one-split", "fa3", "sdpa-cudnn")),
    "peers-backward": Study("backward beside the fastest kernels for Hopper",
                            tuple(_peers_backward()),
                            ("ours-atomics", "fa4-deterministic", "fa3-deterministic", "fa3",
                             *_TORCH),
                            ("fa4-deterministic", "fa3-deterministic", "sdpa-cudnn")),
    "residual": Study("training calls with keep_residual",
                      tuple(case for case in (*_FORWARD, *_BACKWARD) if case.group == "dense"
                            and case.shape.seqlen in (512, 4096, 16_384)), ("ours+residual",)),
}  # fmt: skip
