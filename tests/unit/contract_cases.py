"""Calls of the contract tests, in which bits could easily depend on more than the row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from attention_cases import Inputs, make_inputs
from calls import int32
from flash_attn_deterministic.reference import attention
from flash_attn_deterministic.verify.contract.call import garbage

Result = tuple[torch.Tensor, torch.Tensor]

INF = float("inf")
# Small, for several blocks and splits in short tests.
BLOCK_N = 16
SPLIT = 64

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal-one-split": {"causal": True, "split_size": 0},
    "causal-window": {"causal": True, "window": (37, 0)},
    "window": {"window": (20, 6)},
    "window-left": {"window": (33, -1)},
    "window-right": {"window": (-1, 9)},
    "softcap": {"causal": True, "softcap": 2.5},
    "alibi": {"causal": True, "alibi": True},
    "everything": {"window": (45, 3), "softcap": 4.0, "alibi": True},
    "everything-causal": {"window": (45, 0), "softcap": 4.0, "alibi": True},
    "sink": {"window": (37, 0), "learnable_sink": torch.tensor([0.5, -INF, 2.0, 90.0])},
}

# Those in which no row sees a key after its own.
CAUSAL = [
    name
    for name, options in FEATURES.items()
    if options.get("causal") or options.get("window", (-1, -1))[1] == 0
]

# Ragged, with empty sequences of either kind; more queries than keys, fewer, and as many.
RAGGED = [(0, 5), (17, 17), (1, 65), (3, 0), (0, 0), (64, 63), (16, 129), (20, 7), (1, 65)]


@dataclass(frozen=True)
class Call:
    """One call of reference.attention. slopes are (batch, nheads)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Result:
        return attention(self.q, self.k, self.v, alibi_slopes=self.slopes, **self.options)

    @property
    def seqlen(self) -> int:
        return self.k.shape[1]

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    def sequences(self, index: slice | list[int]) -> Call:
        slopes = None if self.slopes is None else self.slopes[index]
        return replace(self, q=self.q[index], k=self.k[index], v=self.v[index], slopes=slopes)

    def rows(self, begin: int, end: int) -> Call:
        """The queries [begin, end), with the keys up to the last one's own."""
        return replace(self, q=self.q[:, begin:end], k=self.k[:, :end], v=self.v[:, :end])

    def keyword_arguments(self) -> dict[str, Any]:
        """Arguments shared with varlen_attention and kvcache_attention."""
        return {"alibi_slopes": self.slopes, **self.options}


def make_call(feature: str, batch: int, seqlen_q: int, seqlen_k: int, **shape: Any) -> Call:
    """Inputs with ties, zeros of both signs, and scores that make earlier sums vanish."""
    options = {"block_n": BLOCK_N, "split_size": SPLIT, **FEATURES[feature]}
    dtype = torch.float16 if feature in ("causal", "window", "alibi") else torch.bfloat16
    shape = {"nheads": 4, "nheads_k": 2, "head_dim": 16, "dtype": dtype, **shape}
    q, k, v = make_inputs(batch, seqlen_q, seqlen_k, seed=seqlen_q * 1000 + seqlen_k, **shape)
    v[:, ::3, :, ::2] = 0.0
    v[:, ::5, :, ::2] = -0.0
    k[:, 1::7] = k[:, :1]
    k[:, 3::31, :1] *= 100.0
    slopes = None
    if options.pop("alibi", False):
        heads = 2.0 ** -torch.arange(1.0, shape["nheads"] + 1)
        slopes = heads * torch.linspace(0.5, 1.0, batch)[:, None]
    return Call(q, k, v, slopes, options)


def rows_of(result: Result, begin: int, end: int) -> Result:
    return result[0][:, begin:end], result[1][:, :, begin:end]


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return int32(*itertools.accumulate(lengths, initial=0))


def padded(tokens: torch.Tensor, capacity: int, leftpad: int = 0) -> torch.Tensor:
    """Puts (batch, seqlen, ...) into a longer buffer, with garbage before and after."""
    buffer = garbage((tokens.shape[0], capacity, *tokens.shape[2:]), tokens)
    buffer[:, leftpad : leftpad + tokens.shape[1]] = tokens
    return buffer


def paged(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], page: int, seed: int = 0
) -> Inputs:
    """Puts sequences (seqlen, nheads_k, head_dim) into shuffled pages, garbage everywhere else.

    Returns:
        k and v (num_pages, page, nheads_k, head_dim), and the block table, whose entries beyond a
        sequence's pages name a page of garbage.
    """
    counts = [-(-len(tokens) // page) for tokens in keys]
    spare = sum(counts)
    order = torch.randperm(spare, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(keys), max(counts) + 2), spare, dtype=torch.int32)
    pages_k = garbage((spare + 1, page, *keys[0].shape[1:]), keys[0])
    pages_v = pages_k.clone()
    for sequence, count in enumerate(counts):
        for i in range(count):
            number = order.pop()
            table[sequence, i] = number
            for pages, tokens in ((pages_k, keys[sequence]), (pages_v, values[sequence])):
                part = tokens[i * page : (i + 1) * page]
                pages[number, : len(part)] = part
    return pages_k, pages_v, table
