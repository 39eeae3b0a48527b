"""A shape that is timed, and its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attentions import Packed
from ..attentions.served import paged

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LATENT_SCALE = 192**-0.5  # DeepSeek's, whose keys have 192 columns before they are absorbed


@dataclass(frozen=True)
class Shape:
    """One thing to time."""

    kind: str  # "forward", "backward" or "decode"
    batch: int  # sequences
    seqlen: int  # keys of a sequence; of packed sequences the longest
    nheads: int  # query heads
    nheads_k: int  # key heads
    head_dim: int
    causal: bool = False  # whether the mask is causal, aligned to the bottom right corner
    dtype: str = "bf16"  # of DTYPES
    seqlen_q: int = 0  # queries of a sequence; 0: as many as keys, in a decode one
    window: int = -1  # keys before its own that a query sees, in a causal shape; -1: all
    lengths: tuple[int, ...] = ()  # keys of packed sequences; empty: dense
    # Tokens of a page; 0: keys and values in one piece. Packed sequences in pages: as in servers.
    page_size: int = 0
    # Columns of keys that are the values, as in latent attention; 0: values of their own.
    head_dim_v: int = 0

    @property
    def name(self) -> str:
        """Returns e.g. "decode B8 L4096 H32/8 D128 bf16"."""
        shortest = min(self.lengths, default=self.seqlen)
        keys = f"{shortest}..{self.seqlen}" if self.lengths else str(self.seqlen)
        length = f"Lq{self.seqlen_q} Lk{keys}" if self.seqlen_q else f"L{keys}"
        heads = f"H{self.nheads}" + (f"/{self.nheads_k}" if self.nheads_k != self.nheads else "")
        columns = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        words = [self.kind, f"B{self.batch}", length, heads, columns]
        words += ["causal"] * self.causal + [f"window {self.window}"] * (self.window >= 0)
        words += [f"pages of {self.page_size}"] * bool(self.page_size)
        return " ".join([*words, self.dtype])

    @property
    def pairs_of_lengths(self) -> list[tuple[int, int]]:
        """Returns the queries and keys of each sequence."""
        queries = self.seqlen_q or int(self.kind == "decode")
        return [(queries or keys, keys) for keys in self.lengths or [self.seqlen] * self.batch]

    @property
    def kv_bytes(self) -> int:
        """Returns the size of keys and values."""
        tokens = sum(self.lengths) or self.batch * self.seqlen
        return (2 if self.head_dim_v else 4) * tokens * self.nheads_k * self.head_dim

    @property
    def limits(self) -> tuple[int, int]:
        """Returns how many keys before and after its own a query sees; -1: all."""
        return self.window, 0 if self.causal or self.window >= 0 else -1

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of the matrix products on visible keys."""
        columns = (4 if self.kind == "backward" else 1) * self.head_dim
        columns += self.head_dim_v or self.head_dim
        pairs = sum(_visible(*lengths, *self.limits) for lengths in self.pairs_of_lengths)
        return 2 * columns * self.nheads * pairs


def _visible(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    """Returns the pairs of a query and a key that it sees."""

    def until(limit: int) -> int:
        """Returns the keys of all queries up to `limit` after their own: a sum of a ramp."""

        def ramp(last: int) -> int:
            inside = min(max(last, 0), seqlen_k)
            return inside * (inside + 1) // 2 + max(last - seqlen_k, 0) * seqlen_k

        first = seqlen_k - seqlen_q + limit + 1  # keys of the first query
        return ramp(first + seqlen_q - 1) - ramp(first - 1)

    hidden = until(-left - 1) if left >= 0 else 0
    return until(right if right >= 0 else seqlen_q + seqlen_k) - hidden


@functools.lru_cache(maxsize=1)
def _equal_lengths(batch: int, seqlen: int, device: str) -> torch.Tensor:
    """One tensor for all draws of a shape: what plans by lengths, as FlashMLA, plans once."""
    return torch.full((batch,), seqlen, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Problem:
    """A shape with random tensors."""

    shape: Shape  # what to time
    # (batch, seqlen_q, nheads, head_dim), or packed (total_q, nheads, head_dim)
    q: torch.Tensor = field(repr=False)
    # (batch, seqlen, nheads_k, head_dim), packed (total_k, nheads_k, head_dim), or pages
    k: torch.Tensor = field(repr=False)
    v: torch.Tensor = field(repr=False)  # like k, or its first columns
    dout: torch.Tensor = field(repr=False)  # like q
    options: dict[str, Any] = field(repr=False)  # of the call, beside q, k and v

    @staticmethod
    def draw(shape: Shape, device: str, seed: int = 0) -> Problem:
        """Draws the tensors; the same ones for a seed."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(seqlens: Sequence[int], nheads: int, packed: bool) -> torch.Tensor:
            rows = (sum(seqlens),) if packed else (shape.batch, max(seqlens))
            drawn = torch.randn((*rows, nheads, shape.head_dim), generator=generator, device=device)
            return drawn.to(DTYPES[shape.dtype])

        seqlens_q, seqlens_k = zip(*shape.pairs_of_lengths, strict=True)
        packed = bool(shape.lengths)
        q, dout = (normal(seqlens_q, shape.nheads, packed) for _ in range(2))
        k, v = (normal(seqlens_k, shape.nheads_k, packed and not shape.page_size) for _ in range(2))
        options: dict[str, Any] = {"causal": shape.causal}
        if shape.limits[0] >= 0:
            options["window"] = shape.limits
        if packed:
            options["packed"] = Packed.of(seqlens_q, seqlens_k, device)
        if shape.page_size:
            k, v, options["block_table"] = paged(k, v, shape.page_size, generator)
        if shape.page_size and not packed:
            options["seqlens_k"] = _equal_lengths(shape.batch, shape.seqlen, device)
        if shape.head_dim_v:
            v, options["scale"] = k[..., : shape.head_dim_v], _LATENT_SCALE
        return Problem(shape, q, k, v, dout, options)
