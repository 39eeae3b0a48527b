"""Lengths that only the device knows: empty sequences, rows of none, and bounds that do not hold.

Bounds are the caller's promise. Where it is broken, keys and rows beyond them are left out; nobody
else's bits change and no memory of others is touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

from tests.gpu.attention import assert_same, make_qkv, same_bits, skip_unless_built
from tests.gpu.gradients import int32

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def stale_memory() -> Iterator[None]:
    """Lets fresh tensors hold NaN, as those that the allocator hands out again may."""
    skip_unless_built(64, "bf16")
    for size in (2**8, 2**12, 2**16, 2**20, 2**24):
        del_me = [torch.full((size,), math.nan, device="cuda") for _ in range(4)]
        del del_me
    yield
    torch.cuda.synchronize()


def starts(*lengths: int) -> torch.Tensor:
    return int32([0, *itertools.accumulate(lengths)])


def packed(
    nheads: int, nheads_k: int, total_q: int, lengths_k: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = make_qkv((1, total_q, nheads, 64), sum(lengths_k), nheads_k)
    return q[0], k[0], v[0]


@pytest.mark.parametrize(
    ("nheads", "nheads_k"),
    [(8, 2), (48, 1), (24, 1), (34, 2), (4, 4)],
    ids=["group-of-4", "group-of-48", "group-of-24", "group-of-17", "no-groups"],
)
@pytest.mark.parametrize("split_size", [64, 2048], ids=["parts", "whole"])
@pytest.mark.parametrize(
    "lengths_q",
    [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1), (0, 0, 0)],
    ids=lambda lengths: "".join(map(str, lengths)),
)
def test_packed_sequences_of_at_most_one_query(
    lengths_q: tuple[int, ...], split_size: int, nheads: int, nheads_k: int
) -> None:
    """Whether a row has a query is known to the device alone, also where rows are left over."""
    lengths_k = (64, 200, 129)
    q, k, v = packed(nheads, nheads_k, 3, lengths_k)
    out, softmax_lse, _ = flash_attn_varlen_func(
        q, k, v, starts(*lengths_q), starts(*lengths_k), 1, 200,
        causal=True, split_size=split_size, return_attn_probs=True,
    )  # fmt: skip
    token, first = 0, 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        if length_q:
            keys = slice(first, first + length_k)
            one = flash_attn_func(
                q[None, token : token + 1], k[None, keys], v[None, keys],
                causal=True, split_size=split_size, return_attn_probs=True,
            )  # fmt: skip
            assert same_bits(out[token], one[0][0, 0])
            assert same_bits(softmax_lse[:, token], one[1][0, :, 0])
        token, first = token + length_q, first + length_k
    assert (out[token:] == 0).all()
    assert (softmax_lse[:, token:] == math.inf).all()


@pytest.mark.parametrize("seqlen", [1, 10, 200], ids=["one-row", "few-rows", "rows"])
def test_rows_of_no_sequence(seqlen: int) -> None:
    q, k, v = packed(4, 2, seqlen + 70, (seqlen + 70,))
    bounds = starts(seqlen)
    out, softmax_lse, _ = flash_attn_varlen_func(
        q, k, v, bounds, bounds, seqlen, seqlen, causal=True, return_attn_probs=True
    )
    assert out[:seqlen].isfinite().all()
    assert (out[seqlen:] == 0).all()
    assert (softmax_lse[:, seqlen:] == math.inf).all()


@pytest.mark.parametrize(
    ("seqlen_q", "batch"), [(3, 2), (100, 2), (100, 200)], ids=["few-rows", "parts", "one-cta"]
)
@pytest.mark.parametrize("most", [64, 130, 256], ids=["one-split", "three-splits", "four-splits"])
def test_keys_beyond_max_seqlen_k_are_left_out(most: int, seqlen_q: int, batch: int) -> None:
    """The host sizes grids, shared memory and scratch by max_seqlen_k."""
    q, k, v = make_qkv((batch, seqlen_q, 8, 64), 700, 2)
    bounds = starts(*[seqlen_q] * batch), starts(*[700] * batch)
    flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = flash_attn_varlen_func(*flat, *bounds, seqlen_q, most, split_size=64)
    wanted = flash_attn_func(q, k[:, :most], v[:, :most], split_size=64)
    assert same_bits(out, wanted.flatten(0, 1))


@pytest.mark.parametrize("most", [1, 16, 100], ids=lambda most: f"most-{most}")
def test_queries_beyond_max_seqlen_q_are_not_computed(most: int) -> None:
    q, k, v = packed(8, 2, 300 + 5 + 40, (700, 700, 700))
    lengths = (300, 5, 40)
    out = flash_attn_varlen_func(
        q, k, v, starts(*lengths), starts(700, 700, 700), most, 700, split_size=64
    )
    first = 0
    for i, length in enumerate(lengths):
        rows = slice(first, first + min(length, most))
        keys = slice(700 * i, 700 * (i + 1))
        one = flash_attn_func(q[None, rows], k[None, keys], v[None, keys], split_size=64)
        assert same_bits(out[rows], one[0])
        first += length


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_appending_to_a_full_cache_leaves_out_what_has_no_room(paged: bool) -> None:
    q, k_cache, v_cache = make_qkv((2, 1, 8, 64), 256, 2)
    _, k, v = make_qkv((2, 1, 8, 64), 1, 2, seed=1)
    cache = (k_cache, v_cache)
    table = None
    if paged:
        cache = tuple(x.view(2 * 16, 16, 2, 64) for x in cache)  # type: ignore[assignment]
        table = torch.arange(32, device="cuda").int().view(2, 16)
    before = [x.clone() for x in cache]
    out = flash_attn_with_kvcache(
        q, *cache, k, v, cache_seqlens=int32([256, 256]), block_table=table, causal=True
    )
    for now, then in zip(cache, before, strict=True):
        assert same_bits(now, then)
    assert same_bits(out, flash_attn_func(q, k_cache, v_cache, causal=True))


def test_cache_with_more_sequences_than_the_batch() -> None:
    q, k_cache, v_cache = make_qkv((5, 1, 8, 64), 300, 2)
    used = int32([300, 17])
    out = flash_attn_with_kvcache(q[:2], k_cache, v_cache, cache_seqlens=used)
    same = flash_attn_with_kvcache(q[:2], k_cache[:2], v_cache[:2], cache_seqlens=used)
    assert same_bits(out, same)


@pytest.mark.parametrize(("argument", "dtype", "softmax_scale", "split_size"), [
    ("q", torch.float32, 0.125, 2048),
    ("softmax_scale", torch.bfloat16, 0.0, 2048),
    ("split_size", torch.bfloat16, 0.125, 2**31),
], ids=["dtype", "scale", "split-size"])  # fmt: skip
def test_a_refused_call_leaves_the_cache_alone(
    argument: str, dtype: torch.dtype, softmax_scale: float, split_size: int
) -> None:
    q, k_cache, v_cache = make_qkv((2, 1, 8, 64), 256, 2, dtype=dtype)
    _, k, v = make_qkv((2, 1, 8, 64), 1, 2, dtype=dtype, seed=1)
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(RuntimeError, match=f"^{argument}: expected"):
        torch.ops.flash_attn_deterministic.kvcache_fwd(
            q, k_cache, v_cache, k, v, int32([7, 8]), None, None, None, None, None, None,
            softmax_scale, -1, 0, 0.0, False, split_size, True,
        )  # fmt: skip
    torch.cuda.synchronize()
    assert_same((k_cache, v_cache), before, ("k_cache", "v_cache"))
