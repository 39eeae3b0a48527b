"""Attention that keeps or breaks a row of the contract on purpose."""

from __future__ import annotations

import os

import torch
from flash_attn_deterministic import flash_attn_func
from torch import Tensor


def good(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Ours, under another name and without lengths."""
    return flash_attn_func(q, k, v, causal=causal)


def split_by_batch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, str]:
    """Cuts the keys by the batch size, as kernels do that fill a GPU."""
    split_size = 64 if q.shape[0] == 1 else 0
    return flash_attn_func(q, k, v, causal=causal, split_size=split_size), "something else"


def raises_for_one_query(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Has no decode."""
    if q.shape[1] == 1:
        raise RuntimeError("no kernel for one query\nand more words")
    return flash_attn_func(q, k, v, causal=causal)


_RESULTS: dict[torch.Size, Tensor] = {}


def same_memory_with_other_bits(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Writes each result over the one before, one unit larger in the last place."""
    before = _RESULTS.get(q.shape)
    out = flash_attn_func(q, k, v, causal=causal)
    if before is None:
        before = _RESULTS[q.shape] = out
    else:
        before.copy_(torch.maximum(out, before))
        before.view(torch.int16).add_(1)
    return before


def another_function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Forgets the mask."""
    return flash_attn_func(q, k, v)


_CALLS: list[int] = []


def fails_later(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Runs out of memory once all others have theirs."""
    _CALLS.append(1)
    if len(_CALLS) > 2:
        raise MemoryError("no room")
    return flash_attn_func(q, k, v, causal=causal)


def has_a_cause(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Wraps what went wrong, as compilers do, with a folder of this machine."""
    raise RuntimeError("observed exception") from NotImplementedError(
        "no backward in /opt/lib/python3.11/peer/_C.so. Aborting"
    )


def ends_the_process(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Does what a fault in compiled code does."""
    os._exit(1)
