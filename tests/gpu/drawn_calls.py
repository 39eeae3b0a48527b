"""Calls of the forward drawn from a seed: forms, masks, lengths, heads, strides.

They reach what lists of cases leave out: how options meet, and lengths around the edges of blocks,
splits and rows of tiles.
"""

from __future__ import annotations

import random
from collections.abc import Callable
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

from tests.gpu.gradients import int32

EDGES = (64, 128, 192, 256, 512, 1024, 2048)  # of blocks, tiles and splits
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


def draw_call(seed: int, head_dims: range, dtype: torch.dtype) -> DrawnCall:
    """Draws a call; the same arguments draw the same call.

    Args:
        seed: of everything.
        head_dims: to draw from.
        dtype: of q, k and v.
    """
    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    head_dim = rng.choice(head_dims)
    nheads_k = rng.choice((1, 1, 2, 3, 4))
    nheads = nheads_k * rng.choice((1, 1, 2, 3, 8))
    form = rng.choice(("dense", "packed", "cache"))
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
    words = f"seed {seed}: {form}, d{head_dim}, heads {nheads}/{nheads_k}"
    if form == "packed":
        count = rng.randint(1, 6)
        lengths_q, lengths_k = (
            [0 if rng.random() < 0.15 else length(most) for _ in range(count)] for _ in "qk"
        )
        starts_q, starts_k = (
            int32([sum(lengths[:i]) for i in range(count + 1)])
            for lengths in (lengths_q, lengths_k)
        )
        spare = rng.choice((0, 0, 5))  # tokens of no sequence
        q = tensor((sum(lengths_q) + spare,), nheads, wide)
        k, v = (tensor((sum(lengths_k) + spare,), nheads_k, wide) for _ in "kv")
        longest = (max(1, *lengths_q), max(1, *lengths_k))
        if spare:
            k[-spare:] = v[-spare:] = float("nan")
        words += f", lengths {lengths_q} {lengths_k}, {options}"
        arguments = (q, k, v, starts_q, starts_k, *longest)
        return DrawnCall(words, flash_attn_varlen_func, arguments, options)
    batch = rng.randint(1, 5)
    seqlen_q, seqlen_k = length(most), length(most)
    q = tensor((batch, seqlen_q), nheads, wide)
    k, v = (tensor((batch, seqlen_k), nheads_k, wide) for _ in "kv")
    words += f", batch {batch}, lengths {seqlen_q} {seqlen_k}, {options}"
    if form == "dense":
        return DrawnCall(words, flash_attn_func, (q, k, v), options)
    used = [rng.randint(0, seqlen_k) for _ in range(batch)]
    order = list(range(batch))
    if rng.random() < 0.3:
        rng.shuffle(order)
        options["cache_batch_idx"] = int32(order)
    for place, sequence in enumerate(order):
        k[sequence, used[place] :] = v[sequence, used[place] :] = float("nan")
    options["cache_seqlens"] = int32(used)
    return DrawnCall(f"{words}, used {used}", flash_attn_with_kvcache, (q, k, v), options)
