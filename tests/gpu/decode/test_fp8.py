"""Caches in float8_e4m3fn: the bits of the same call on the cache in q's dtype."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from flash_attn_deterministic import explain
from flash_attn_deterministic.integrations.paged import PagedAttention
from flash_attn_deterministic.types import Lengths
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    HEAD_DIMS,
    assert_same,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    make_qkv,
    pairwise,
    same_bits,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
PAGE = 48
LENGTHS = (1000, 1, 517)
CONFIGS = pairwise(
    head_dims=(*((d, d) for d in HEAD_DIMS), (192, 128), (64, 32), (32, 96)),
    dtype=("bf16", "fp16"),
    options={
        "full": {},
        "causal": {"causal": True},
        "window": {"window_size": (127, 0), "split_size": 128},
        "softcap": {"softcap": 5.0, "causal": True},
        "alibi": {"alibi_slopes": True},
        "sink": {"learnable_sink": True, "causal": True},
        "one-split": {"causal": True, "split_size": 0},
    },
    seqlen_q=(1, 3, 16, 100),
    heads=((8, 1), (6, 2), (2, 2)),
    layout=("cache", "leftpad", "places", "pages", "packed-pages"),
)


def in_8_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A cache: now and then a subnormal number, 0 or the largest."""
    found = tensor.to(FP8)
    flat = found.flatten().view(torch.uint8)
    flat[::97] &= 0x87
    flat[5::1013] = 0x7E
    return flat.view(FP8).view(found.shape)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def drawn(
    head_dims: tuple[int, int], dtype: str, seqlen_q: int, heads: tuple[int, int], layout: str
) -> tuple[Any, torch.Tensor, list[torch.Tensor], dict[str, Any]]:
    """A function of q, k and v, with q, caches in 8 bits, and the other arguments."""
    skip_unless_built(max(head_dims), dtype)
    batch, room = len(LENGTHS), 1008
    q, k, v = make_qkv(
        (batch, seqlen_q, heads[0], max(head_dims)), room, heads[1], dtype=DTYPES[dtype]
    )
    q = q[..., : head_dims[0]].contiguous()
    caches = [in_8_bits(x[..., :d].contiguous()) for x, d in zip((k, v), head_dims, strict=True)]
    given: dict[str, Any] = {"cache_seqlens": int32(*LENGTHS), "return_softmax_lse": True}
    if "pages" in layout:
        order = torch.randperm(room // PAGE * batch, generator=torch.Generator().manual_seed(0))
        table = order.view(batch, -1)
        given["block_table"] = int32(*table.tolist())
        caches = [x.view(torch.uint8).view(-1, PAGE, *x.shape[2:]) for x in caches]
        for cache in caches:
            cache[order.cuda()] = cache.clone()
        caches = [x.view(FP8) for x in caches]
    elif layout == "leftpad":
        given["cache_leftpad"] = int32(3, 0, 64)
    elif layout == "places":
        given["cache_batch_idx"] = int32(2, 0, 1)
    if layout != "packed-pages":
        return flash_attn_with_kvcache, q, caches, given
    starts = int32(0, seqlen_q, seqlen_q + 1, seqlen_q + 1 + (seqlen_q + 1) // 2)
    given = {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": int32(0, *torch.tensor(LENGTHS).cumsum(0).tolist()),
        "max_seqlen_q": seqlen_q,
        "max_seqlen_k": max(LENGTHS),
        "block_table": given["block_table"],
        "return_attn_probs": True,
    }
    return flash_attn_varlen_func, q.flatten(0, 1), caches, given


@CONFIGS
def test_bits_are_those_of_the_converted_cache(
    head_dims: tuple[int, int],
    dtype: str,
    options: dict[str, Any],
    seqlen_q: int,
    heads: tuple[int, int],
    layout: str,
) -> None:
    function, q, caches, given = drawn(head_dims, dtype, seqlen_q, heads, layout)
    given |= options
    for name in ("alibi_slopes", "learnable_sink"):
        if name in options:
            given[name] = torch.linspace(-1.0, 2.0, heads[0], device="cuda")
    found = function(q, *caches, **given)[:2]
    converted = [cache.to(q.dtype) for cache in caches]
    for schedule in ("", "family=sm80"):
        with device_override(schedule):
            assert_same(found, function(q, *converted, **given)[:2])
    if seqlen_q <= 16:
        plan = explain(function, q, *caches, **given)
        assert (plan.family, plan.path) == ("sm80", "few-rows")


@pytest.mark.parametrize("seqlen_k", [1, 64], ids=["part-of-a-block", "whole-block"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_byte_is_read_as_the_number_that_it_is(dtype: str, seqlen_k: int) -> None:
    """Keys of one value: out is that value, and nothing else."""
    skip_unless_built(64, dtype)
    byte = torch.arange(256, dtype=torch.uint8, device="cuda")
    cache = byte[:, None, None, None].expand(256, 64, 1, 64).contiguous().view(FP8)
    q = torch.zeros(256, 1, 1, 64, dtype=DTYPES[dtype], device="cuda")
    lengths = torch.full((256,), seqlen_k, dtype=torch.int32, device="cuda")
    zeros = torch.zeros_like(cache.view(torch.uint8)).view(FP8)
    out = flash_attn_with_kvcache(q, zeros, cache, cache_seqlens=lengths)
    expected = cache[:, :1].to(q.dtype) + 0.0  # -0 becomes 0 in a sum
    assert torch.equal(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("layout", ["cache", "pages", "packed-pages"])
def test_rows_may_start_at_multiples_of_8_bytes(layout: str) -> None:
    """They are not copied, and change no bit."""
    function, q, caches, given = drawn((128, 128), "bf16", 3, (8, 2), layout)
    expected = function(q, *caches, **given)[:2]
    shifted = []
    for cache in caches:
        room = torch.empty(cache.numel() + 8, dtype=torch.uint8, device="cuda")
        shifted.append(room[8:].view(FP8).view(cache.shape).copy_(cache))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = function(q, *shifted, **given)[:2]
    assert torch.cuda.max_memory_allocated() - before < caches[0].numel()
    assert_same(found, expected)


def test_scales_and_chunks() -> None:
    """Scales multiply q and out; queries at once, in chunks and one by one have equal bits."""
    function, q, caches, given = drawn((128, 128), "bf16", 100, (8, 2), "pages")
    scales = torch.rand(2, 3, 2, device="cuda") + 0.5
    named = {"k_descale": scales[0], "v_descale": scales[1]}
    each = scales.repeat_interleave(4, -1)[:, :, None, :, None]
    given |= {"causal": True}
    lengths = int32(1000, 300, 517)
    given["cache_seqlens"] = lengths
    whole = function(q, *caches, **given, **named)
    scaled = (q.float() * each[0]).bfloat16()
    other = function(scaled, *[cache.bfloat16() for cache in caches], **given)
    assert_same(whole, ((other[0].float() * each[1]).bfloat16(), other[1]))
    for step in (1, 16, 37):
        parts = []
        for first in range(0, 100, step):
            end = min(first + step, 100)
            given["cache_seqlens"] = lengths - (100 - end)
            parts.append(function(q[:, first:end], *caches, **given, **named))
        joined = (torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 2))
        assert_same(whole, joined)


def test_scales_of_servers_in_a_graph() -> None:
    """Numbers there: no tensor is made of them, and the bits are those of the function."""
    function, q, caches, given = drawn((128, 128), "bf16", 3, (8, 2), "packed-pages")
    del given["return_attn_probs"]
    starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
    sizes = given["max_seqlen_q"], given["max_seqlen_k"]
    lengths = Lengths(*starts, *sizes, block_table=given["block_table"])
    attention = PagedAttention(0.05, k_descale=0.371, v_descale=0.013)
    output = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    for context in (nullcontext(), torch.cuda.graph(graph)):
        with context:
            attention(q, (caches[0], caches[1]), lengths, True, output=output)
    output.zero_()
    graph.replay()
    given |= {"causal": True, "v_descale": 0.013}
    assert same_bits(output, function(q, *caches, **given, softmax_scale=0.05 * 0.371))
    rounded = function(q, *caches, **given, softmax_scale=0.05, k_descale=0.371)
    torch.testing.assert_close(output, rounded, atol=0.05 * float(rounded.abs().max()), rtol=0.05)
