"""The studies: which shapes are timed with which attentions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from .problem import Shape

T = TypeVar("T")


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


KERNEL_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # others run on the next of these
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


def _decode(draw: random.Random) -> tuple[Case, ...]:
    """Decode of one query, of a few that are verified at once, and from pages."""

    def case(group: str) -> Case:
        shape = Shape(
            "decode", _between(draw, 1, 256), _between(draw, 1000, 131_072), *_heads(draw), True,
            seqlen_q=draw.randint(2, 16) if group == "several queries" else 1,
            page_size=draw.choice((16, 64)) if group == "pages" else 0,
        )  # fmt: skip
        return Case(group, shape)

    return _drawn(36, case, "one query", "several queries", "pages")


def _paths(draw: random.Random) -> tuple[Case, ...]:
    """Calls of up to 16 queries, for which plans choose among four paths."""
    models = ((32, 8), (64, 8), (40, 8), (28, 4), (24, 8), (16, 16), (32, 1), (8, 1), (64, 2))

    def case(seqlen_q: int) -> Case:
        shape = Shape(
            "decode", _between(draw, 1, 256), _between(draw, 300, 40_000), *draw.choice(models),
            draw.choice((64, 128, 256)), True, seqlen_q=seqlen_q,
            page_size=draw.choice((0, 16, 64)),
        )  # fmt: skip
        return Case("one query" if seqlen_q == 1 else "several queries", shape)

    return _drawn(48, case, 1, 2, 4, 8, 16)


def _servers(draw: random.Random) -> tuple[Case, ...]:
    """Ragged batches as servers call them: queries packed, keys in pages."""

    def case(group: str) -> Case:
        longest = _between(draw, 1000, 131_072)
        lengths = tuple(draw.randint(longest // 2, longest) for _ in range(_between(draw, 1, 256)))
        queries = {"prefill": 0, "chunk": 2 ** draw.randint(8, 11), "one query": 1}
        shape = Shape(
            "forward" if group in ("prefill", "chunk") else "decode",
            len(lengths), max(lengths), *_heads(draw), True,
            seqlen_q=queries.get(group, draw.randint(2, 8)), lengths=lengths,
            page_size=draw.choice((16, 64)),
        )  # fmt: skip
        few = shape.batch * shape.nheads_k < 64 and min(lengths) >= 8000
        return Case(f"{group}, few long" if few and shape.kind == "decode" else group, shape)

    return _drawn(60, case, "prefill", "one query", "chunk", "one query", "several queries")


def _latent() -> tuple[Case, ...]:
    """Decode of latent attention, of one query, and of one more that is verified with it."""
    sizes = itertools.product(
        (1000, 8000, 32_000), (1, 8, 32, 128), (("one query", 1), ("two queries", 2)),
        (16, 32, 64, 128),
    )  # fmt: skip
    return tuple(
        Case(f"{nheads} heads, {words}", Shape(
            "decode", batch, seqlen, nheads, 1, 576, True, seqlen_q=seqlen_q, page_size=64,
            head_dim_v=512,
        ))
        for seqlen, batch, (words, seqlen_q), nheads in sizes
    )  # fmt: skip


def _peers(kind: str, draw: random.Random) -> tuple[Case, ...]:
    """Prefill or training: each head dim, padded ones too, from 128 to 131,072 tokens."""

    def case(group: str) -> Case:
        longest, batch = _between(draw, 128, 131_072), _between(draw, 1, 128)
        nheads_k = 2 ** draw.randint(0, 5)
        nheads = nheads_k * (1 if group == "dense" else 2 ** draw.randint(group == "GQA", 4))
        shape = Shape(
            kind, batch, longest, nheads, nheads_k, draw.choice((32, 64, 64, 128, 128, 128, 96, 192,
            256, 8 * draw.randint(4, 32))), draw.random() < 0.7,
        )  # fmt: skip
        if group == "packed":
            lengths = tuple(draw.randint(longest // 8 + 1, longest) for _ in range(batch))
            shape = replace(shape, seqlen=max(lengths), lengths=lengths)
        if group == "window":
            shape = replace(shape, causal=True, window=_between(draw, 128, 4096))
        if group == "chunk":
            queries = 2 ** draw.randint(8, 12)
            shape = replace(shape, causal=True, seqlen=longest + queries, seqlen_q=queries)
        return Case(group, shape)

    groups = ["dense", "GQA", "packed", "dense", "window", *["chunk"] * (kind == "forward")]
    return _drawn(48, case, *groups)


def _drawn(count: int, case: Callable[[T], Case], *groups: T) -> tuple[Case, ...]:
    """Draws cases of groups, or numbers, in turns: a run that ends early has some of each.

    Each is drawn until it neither takes 60 ms of a GPU, or its memory, nor leaves it idle.
    """
    turns = itertools.islice(itertools.cycle(groups), count)
    return tuple(next(filter(_fits, map(case, itertools.repeat(group)))) for group in turns)


def _fits(case: Case) -> bool:
    shape = case.shape
    rows = sum(queries for queries, _ in shape.pairs_of_lengths) * shape.nheads * shape.head_dim
    fits = shape.kv_bytes <= 2**32 and rows <= 2**30 and shape.flops <= 4e13
    busy = shape.flops >= 2e10 and 4 <= shape.batch * shape.nheads <= 512
    return fits and (shape.kind == "decode" or busy)


def _between(draw: random.Random, least: int, most: int) -> int:
    """Draws a number whose logarithm is uniform."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def _heads(draw: random.Random) -> tuple[int, int, int]:
    """Draws query heads, key heads and a head dim, of models that are served."""
    models = ((32, 8), (32, 8), (64, 8), (40, 8), (28, 4), (16, 16), (32, 1), (8, 1), (64, 2))
    return (*draw.choice(models), draw.choice((64, 128, 128, 256)))


_TORCH = ("sdpa-cudnn", "sdpa-flash")
_PATHS = ("ours-one-cta", "ours-parts", "ours-few-rows", "ours-scores-first")
STUDIES = {
    "usual": Study("nine shapes of prefill, decode and backward",
                   tuple(Case(shape.kind, shape) for shape in _USUAL), ()),
    "cpu": Study("three small shapes, for a machine without a GPU", _CPU, ()),
    "decode": Study("decode, by CUDA graphs over caches larger than the L2 cache",
                    _decode(random.Random(1)),
                    ("flash_attn", "fa3", "fa3-one-split", "read")),
    "paths": Study("calls of few queries beside each path forced, one of which a plan chooses",
                   _paths(random.Random(5)), (*_PATHS, "fa3-one-split"), _PATHS),
    "servers": Study("ragged batches in pages, as servers call them",
                     _servers(random.Random(2)),
                     ("fa3-one-split", "fa3", "flashinfer-fixed-split")),
    "latent": Study("decode of latent attention (MLA), from pages", _latent(),
                    ("ours@512", "flashmla", "read")),
    "peers-forward": Study("prefill beside the fastest kernels for Hopper",
                           _peers("forward", random.Random(3)),
                           ("fa4", "fa3-one-split", "fa3", *_TORCH),
                           ("fa4", "fa3-one-split", "fa3", "sdpa-cudnn")),
    "peers-backward": Study("backward beside the fastest kernels for Hopper",
                            _peers("backward", random.Random(4)),
                            ("ours-atomics", "fa4-deterministic", "fa3-deterministic", "fa3",
                             *_TORCH),
                            ("fa4-deterministic", "fa3-deterministic", "sdpa-cudnn")),
}  # fmt: skip
