"""Calls of the forward drawn from a seed: forms, masks, lengths, heads, strides.

They reach what lists of cases leave out: how options meet, and lengths around the edges of blocks,
splits and rows of tiles.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flash_attn_deterministic import (
    Plan,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.call import Attention, Call, cumulative

from tests.gpu.attention import DTYPES
from tests.gpu.gradients import int32

EDGES = (64, 128, 192, 256, 512, 1024, 2048)  # of blocks, tiles and splits
GROUPS = (1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 32)  # of query heads
FEW = (1, 1, 1, 2, 3, 4, 5, 8, 13, 16)  # queries, as decode has them
PAGE_SIZES = (16, 32, 48, 64, 80, 256)
MOST_ELEMENTS = 2**24  # of each tensor of a call


@dataclass(frozen=True)
class DrawnCall:
    """A call, with its draw in short; calling it gives out and softmax_lse."""

    words: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        of_cache = self.function is flash_attn_with_kvcache
        lse = "return_softmax_lse" if of_cache else "return_attn_probs"
        out, softmax_lse, *_ = self.function(*self.arguments, **self.options, **{lse: True})
        return out, softmax_lse

    @property
    def plan(self) -> Plan:
        """That of contiguous tensors of the same shapes."""
        return explain(self.function, *self.arguments, **self.options)


def draw_call(
    seed: int, head_dims: Sequence[int], dtype: torch.dtype | None = None, few: bool = False
) -> DrawnCall:
    """Draws a call; the same arguments draw the same call.

    Args:
        seed: of everything.
        head_dims: to draw from.
        dtype: of q, k and v; None: drawn, too.
        few: whether each sequence has a few queries, in groups of any size.
    """
    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    head_dim = rng.choice(head_dims)
    dtype = dtype or rng.choice([*DTYPES.values()])
    nheads_k = rng.choice((1, 1, 2, 3) if few else (1, 1, 2, 3, 4))
    nheads = nheads_k * rng.choice(GROUPS if few else (1, 1, 2, 3, 8))
    form = rng.choice(("dense", "packed", "packed-pages", "cache", "pages"))
    options: dict[str, Any] = {"split_size": rng.choice((0, 64, 128, 256, 384, 512, 2048))}
    mask = rng.choice(("full", "causal", "causal", "window", "left", "right"))
    if mask == "causal":
        options["causal"] = True
    elif mask != "full":
        left, right = (rng.choice((0, 1, 63, 64, 100, 300, 1000)) for _ in "lr")
        options["window_size"] = (-1 if mask == "right" else left, -1 if mask == "left" else right)
    if rng.random() < 0.2:
        options["softcap"] = rng.choice((0.5, 3.0, 50.0))
    if rng.random() < 0.3:
        options["softmax_scale"] = rng.choice((0.01, 0.3, 2.0))
    if few and rng.random() < 0.2:
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, nheads, device="cuda")

    def length(most: int) -> int:
        if rng.random() < 0.5:
            return min(most, max(1, rng.choice(EDGES) + rng.randint(-2, 2)))
        return rng.randint(1, most)

    def tensor(rows: tuple[int, ...], heads: int, wide: bool) -> torch.Tensor:
        """(*rows, heads, head_dim): contiguous, a part of larger rows, or heads before tokens."""
        if wide:
            padded = torch.empty(*rows, heads + 1, head_dim + 8, device="cuda", dtype=dtype)
            part = padded[..., 1:, :head_dim]
        else:
            part = torch.empty(*rows, heads, head_dim, device="cuda", dtype=dtype)
        if not wide and len(rows) == 2 and rng.random() < 0.2:
            part = torch.empty(rows[0], heads, rows[1], head_dim, device="cuda", dtype=dtype)
            part = part.transpose(1, 2)
        # Rising maxima and peaks: with scores all alike nothing is ever rescaled.
        spread = torch.randn(*rows, 1, 1, generator=generator, device="cuda").exp()
        drawn = torch.randn(*rows, heads, head_dim, generator=generator, device="cuda")
        return part.copy_(drawn * spread.clamp(max=8))

    wide = rng.random() < 0.2
    most = max(256, min(4100, MOST_ELEMENTS // (4 * nheads * head_dim)))
    words = f"seed {seed}: {form}, d{head_dim} {dtype}, heads {nheads}/{nheads_k}"
    page_size = rng.choice(PAGE_SIZES)
    if form.startswith("packed"):
        count = rng.randint(1, 6)
        lengths_k = [0 if rng.random() < 0.15 else length(most) for _ in range(count)]
        lengths_q = [
            0 if rng.random() < 0.15 else rng.choice(FEW) if few else length(most)
            for _ in range(count)
        ]
        spare = rng.choice((0, 0, 5))  # tokens of no sequence
        q = tensor((sum(lengths_q) + spare,), nheads, wide)
        total_k = max(sum(lengths_k) + spare, int(few))
        k, v = (tensor((total_k,), nheads_k, wide) for _ in "kv")
        longest = (max(1, *lengths_q), max(1, *lengths_k))
        if spare:
            k[-spare:] = v[-spare:] = float("nan")
        words += f", lengths {lengths_q} {lengths_k}, {options}"
        if form == "packed-pages":
            ends = [*itertools.accumulate(lengths_k)]
            parts = [slice(end - n, end) for n, end in zip(lengths_k, ends, strict=True)]
            k, v, options["block_table"] = in_pages(
                [(k[x], v[x]) for x in parts], page_size, seed, ends=longest[0] > max(FEW)
            )
        starts = (cumulative(lengths, q.device) for lengths in (lengths_q, lengths_k))
        return DrawnCall(words, flash_attn_varlen_func, (q, k, v, *starts, *longest), options)
    batch = rng.randint(1, 5)
    seqlen_q, seqlen_k = rng.choice(FEW) if few else length(most), length(most)
    q = tensor((batch, seqlen_q), nheads, wide)
    k, v = (tensor((batch, seqlen_k), nheads_k, wide) for _ in "kv")
    words += f", batch {batch}, lengths {seqlen_q} {seqlen_k}, {options}"
    if form == "dense":
        return DrawnCall(words, flash_attn_func, (q, k, v), options)
    used = [rng.randint(0, seqlen_k) for _ in range(batch)]
    order = list(range(batch))
    if form == "pages":
        rows = [(k[i, :n], v[i, :n]) for i, n in enumerate(used)]
        k, v, options["block_table"] = in_pages(rows, page_size, seed, ends=seqlen_q > max(FEW))
    elif rng.random() < 0.3:
        rng.shuffle(order)
        options["cache_batch_idx"] = int32(order)
    if form == "cache":
        for place, sequence in enumerate(order):
            k[sequence, used[place] :] = v[sequence, used[place] :] = float("nan")
    options["cache_seqlens"] = int32(used)
    return DrawnCall(f"{words}, used {used}", flash_attn_with_kvcache, (q, k, v), options)


def in_pages(
    sequences: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int, seed: int, ends: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (seqlen, nheads_k, head_dim) in pages, NaN and Inf behind their ends.

    The rest of a row of the block table names pages of garbage or, with `ends`, none that exist.
    """
    attention = Attention.installed()
    calls = [Call(attention, k, k[None], v[None], k) for k, v in sequences]
    k_pages, v_pages, table = layouts.pages(calls, page_size, seed)
    for row, (k, _) in zip(table, sequences, strict=True):
        if ends:
            row[-(-len(k) // page_size) :] = 2**30
    return k_pages, v_pages, table
