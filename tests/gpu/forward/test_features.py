"""Calls beyond the accuracy checks: long caches, graphs, compilation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from flash_attn_deterministic import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.verify import bounds
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.call import Attention, draw
from flash_attn_deterministic.verify.exact import Definition

from tests.gpu.attention import DTYPES, assert_same, make_qkv, same_bits, skip_unless_built
from tests.gpu.gradients import int32

pytestmark = pytest.mark.gpu

Result = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("split_size", [64, 2048, 0])
@pytest.mark.parametrize("seqlen_k", [65_537, 131_073])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16")])
def test_decode_of_more_than_65536_tokens(
    head_dim: int, dtype: str, seqlen_k: int, split_size: int
) -> None:
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((2, 1, 4, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    out, softmax_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, split_size=split_size)
    found = {"out": out, "softmax_lse": softmax_lse}
    errors = bounds.forward(found, Definition().forward(q, k, v), q.dtype, 0.0)
    assert all(error.ratio <= 1 for error in errors.values()), errors
    if split_size:
        plan = explain(flash_attn_func, q, k, v, split_size=split_size)
        assert plan.path in ("few-rows", "scores-first")
        assert plan.num_splits == -(-seqlen_k // split_size)


def test_leftpad_of_varlen() -> None:
    skip_unless_built(64, "bf16")
    call = draw(
        Attention.installed(), (3, 70, 4, 64), 700, 2,
        dtype="bf16", device="cuda", seed=0, options={"causal": True},
    )  # fmt: skip
    for one, own in layouts.packed(call, [70] * 3, [700, 600, 6], room=764, leftpad=64).parts:
        assert_same(tuple(own.values()), tuple(one().values()))


def make_cache(
    head_dim: int, dtype: str, batch: int = 3, capacity: int = 200, new: int = 5
) -> tuple[torch.Tensor, ...]:
    """Returns q, k_cache, v_cache, k and v."""
    skip_unless_built(head_dim, dtype)
    q, k_cache, v_cache = make_qkv((batch, new, 4, head_dim), capacity, 2, dtype=DTYPES[dtype])
    _, k, v = make_qkv((batch, new, 4, head_dim), new, 2, dtype=DTYPES[dtype], seed=1)
    return q, k_cache, v_cache, k, v


def make_rotary(rotary_dim: int, seqlen: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(rotary_dim // 2, device="cuda") * 2 / rotary_dim)
    angles = torch.arange(seqlen, device="cuda")[:, None] * frequencies
    return angles.cos().to(DTYPES[dtype]), angles.sin().to(DTYPES[dtype])


def test_equal_batch_indices_without_appending() -> None:
    q, k_cache, v_cache, _, _ = make_cache(64, "bf16", 3)
    result = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_batch_idx=int32([1, 1, 2]), return_softmax_lse=True
    )
    order = [1, 1, 2]
    expected = flash_attn_func(q, k_cache[order], v_cache[order], return_attn_probs=True)
    assert_same(result, expected[:2])


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16")])
def test_cuda_graph_with_other_lengths(head_dim: int, dtype: str, rotary: bool) -> None:
    capacity = 3000
    q, k_cache, v_cache, k, v = make_cache(head_dim, dtype, capacity=capacity, new=1)
    options: dict[str, Any] = {"causal": True, "split_size": 512, "return_softmax_lse": True}
    if rotary:
        cos, sin = make_rotary(64, capacity, dtype)
        options |= {"rotary_cos": cos, "rotary_sin": sin}
    lengths = int32([5, 600, 700])
    for cache in (k_cache, v_cache):
        cache[:, 2900:] = math.nan
    start = [t.clone() for t in (q, k_cache, v_cache, k, v)]
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, **options
        )
    for turn, values in enumerate(([0, 511, 2890], [2047, 2048, 1], [512, 63, 64])):
        fresh = [t * (1 + turn) for t in start]
        for buffer, tensor in zip((q, k_cache, v_cache, k, v), fresh, strict=True):
            buffer.copy_(tensor)
        lengths.copy_(int32(values))
        graph.replay()
        eager: Any = flash_attn_with_kvcache(
            fresh[0], fresh[1], fresh[2], fresh[3], fresh[4], cache_seqlens=int32(values), **options
        )
        assert_same(result, eager)
        assert same_bits(k_cache, fresh[1])
        assert same_bits(v_cache, fresh[2])


# torch.compile itself warns about what it plans to change.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_torch_compile_of_varlen(causal: bool) -> None:
    q, k, v = (t.flatten(0, 1) for t in make_cache(64, "bf16", new=200)[:3])
    torch.compiler.reset()

    def call(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Result:
        out, softmax_lse, _ = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            200,
            200,
            causal=causal,
            return_attn_probs=True,
            split_size=128,
        )
        return out, softmax_lse

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([200, 200, 200], [150, 0, 200, 50, 200]):
        cu_seqlens = int32([0, *itertools.accumulate(lengths)])
        assert_same(compiled(cu_seqlens, cu_seqlens), call(cu_seqlens, cu_seqlens))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("append", [False, True], ids=["read", "append"])
def test_torch_compile_of_kvcache(append: bool) -> None:
    q, k_cache, v_cache, k, v = make_cache(64, "bf16")
    torch.compiler.reset()

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor) -> Result:
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k if append else None,
            v if append else None,
            cache_seqlens=lengths,
            causal=True,
            return_softmax_lse=True,
            split_size=128,
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for values in ([5, 64, 190], [1, 2, 130]):
        caches, others = ([k_cache.clone(), v_cache.clone()] for _ in range(2))
        lengths = int32(values)
        result = compiled(caches[0], caches[1], lengths)
        assert_same(result, call(others[0], others[1], lengths))
        for one, other in zip(caches, others, strict=True):
            assert same_bits(one, other)


@pytest.mark.filterwarnings("ignore")
def test_opcheck_of_varlen() -> None:
    q, k, v = (t.flatten(0, 1) for t in make_cache(64, "bf16")[:3])
    tree = (0.0, 0.125, -1, 0, 0.0, 128, True, True)
    cu_seqlens = int32([0, 5, 10, 15]), int32([0, 200, 400, 600])
    result = torch.library.opcheck(
        torch.ops.flash_attn_deterministic.varlen_fwd.default,
        (q, k, v, *cu_seqlens, *[None] * 5, 5, 200, *tree),
    )
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("append", [False, True], ids=["read", "append"])
def test_opcheck_of_kvcache(append: bool) -> None:
    q, k_cache, v_cache, k, v = make_cache(64, "bf16")
    new = (k, v) if append else (None, None)
    scores = (0.125, -1, 0, 0.0)
    result = torch.library.opcheck(
        torch.ops.flash_attn_deterministic.kvcache_fwd.default,
        (q, k_cache, v_cache, *new, int32([5, 64, 190]), *[None] * 6, *scores, True, 128, True),
    )
    assert set(result.values()) == {"SUCCESS"}
