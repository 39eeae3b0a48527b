"""Calls of a few queries, drawn by seed: every layout, mask and number of rows that decode has."""

from __future__ import annotations

import random
from typing import Any

import torch
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

from tests.gpu.attention import DTYPES, make_qkv
from tests.gpu.drawn_calls import DrawnCall
from tests.gpu.gradients import int32

HEAD_DIMS = (32, 40, 64, 80, 96, 128, 160, 192, 256)
LAYOUTS = ("dense", "cache", "packed", "pages")
GROUPS = (1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 32)


def draw(seed: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> DrawnCall:
    """Draws a call; the same for a seed, whatever was drawn before."""
    source = random.Random(seed)
    head_dim, dtype = source.choice(head_dims), source.choice(("bf16", "fp16"))
    layout, group = source.choice(LAYOUTS), source.choice(GROUPS)
    batch, nheads_k = source.randint(1, 4), source.randint(1, 3)
    seqlen_q = source.choice((1, 1, 1, 2, 3, 4, 5, 8, 13, 16))
    capacity = source.choice((1, 63, 64, 65, 300, 777, 2049, 5000))
    options: dict[str, Any] = {"split_size": source.choice((0, 64, 256, 2048, 2048))}
    mask = source.choice(("full", "causal", "window", "left"))
    if mask == "causal":
        options["causal"] = True
    elif mask != "full":
        right = source.randint(0, 40) if mask == "window" else -1
        options["window_size"] = (source.randint(0, 3000), right)
    if source.random() < 0.2:
        options["softcap"] = 15.0
    q, k, v = make_qkv(
        (batch, seqlen_q, nheads_k * group, head_dim),
        capacity,
        nheads_k,
        dtype=DTYPES[dtype],
        seed=seed,
    )
    if source.random() < 0.2:
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, nheads_k * group, device="cuda")
    lengths = [source.choice((0, 1, capacity, source.randint(0, capacity))) for _ in range(batch)]
    words = (
        f"seed {seed}: {layout} D{head_dim} {dtype} B{batch} q{seqlen_q} L{capacity} "
        f"H{nheads_k * group}/{nheads_k} {lengths} {mask} {sorted(options)}"
    )
    if layout == "dense":
        return DrawnCall(words, flash_attn_func, (q, k, v), options)
    if layout == "packed":
        lengths_q = [seqlen_q, *(source.randint(0, seqlen_q) for _ in range(batch - 1))]
        starts_q, starts_k = ([sum(n[:i]) for i in range(batch + 1)] for n in (lengths_q, lengths))
        rows = (
            q.flatten(0, 1)[: starts_q[-1]],
            *(t.flatten(0, 1)[: max(starts_k[-1], 1)] for t in (k, v)),
        )
        bounds = (int32(starts_q), int32(starts_k), seqlen_q, capacity)
        return DrawnCall(words, flash_attn_varlen_func, (*rows, *bounds), options)
    for b, length in enumerate(lengths):  # what lies behind a sequence must not be read
        k[b, length:] = v[b, length:] = float("nan")
    options["cache_seqlens"] = int32(lengths)
    if layout == "cache":
        return DrawnCall(words, flash_attn_with_kvcache, (q, k, v), options)
    size = 16 * source.choice((1, 2, 3, 16))
    count = -(-capacity // size)
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(seed)).cuda()
    pages = []
    for tensor in (k, v):
        filled = torch.full(
            (batch, count * size, *tensor.shape[2:]), float("nan"), device="cuda", dtype=q.dtype
        )
        filled[:, :capacity] = tensor
        shuffled = torch.empty(batch * count, size, *tensor.shape[2:], device="cuda", dtype=q.dtype)
        shuffled[order] = filled.view(batch * count, size, *tensor.shape[2:])
        pages.append(shuffled)
    options["block_table"] = order.view(batch, count).int()
    return DrawnCall(words, flash_attn_with_kvcache, (q, *pages), options)
