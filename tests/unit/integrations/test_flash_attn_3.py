"""FlashAttention-3's signatures: the same calls of this package's functions."""

from __future__ import annotations

import inspect
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic import as_flash_attn
from flash_attn_deterministic.errors import ArgumentError, UnsupportedError
from flash_attn_deterministic.integrations import flash_attn_3

ours: Any = package
theirs: Any = flash_attn_3
FP8 = torch.float8_e4m3fn

Q = normal(2, 20, 4, 32, seed=0)
K, V = (normal(2, 20, 2, 32, seed=seed) for seed in (1, 2))


def test_dense_and_packed_calls() -> None:
    options = {"softmax_scale": 0.2, "causal": True, "window_size": (9, 0)}
    out, lse = theirs.flash_attn_func(Q, K, V, return_attn_probs=True, num_splits=3, **options)
    expected, expected_lse, _ = ours.flash_attn_func(Q, K, V, return_attn_probs=True, **options)
    assert bits_equal(out, expected)
    assert bits_equal(lse, expected_lse)
    packed, starts = [t.flatten(0, 1) for t in (Q, K, V)], int32(0, 20, 40)
    out = theirs.flash_attn_varlen_func(*packed, starts, starts, 20, 20, **options)
    assert bits_equal(out.unflatten(0, (2, 20)), expected)


def test_gradients_follow() -> None:
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    torch.autograd.backward(theirs.flash_attn_func(q, k, v, causal=True, softcap=5.0).sum())
    same = [t.clone().requires_grad_() for t in (Q, K, V)]
    torch.autograd.backward(ours.flash_attn_func(*same, causal=True, softcap=5.0).sum())
    for one, other in zip((q, k, v), same, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert bits_equal(one.grad, other.grad)


def pages() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = int32(3, 1, 2, 0).view(2, 2)
    k_cache, v_cache = (torch.zeros(4, 16, 2, 32, dtype=torch.bfloat16) for _ in range(2))
    for cache, rows in ((k_cache, K), (v_cache, V)):
        for b in range(2):
            cache[table[b, 0]] = rows[b, :16]
            cache[table[b, 1], :4] = rows[b, 16:]
    return k_cache, v_cache, table


def test_cache_with_and_without_packed_queries() -> None:
    k_cache, v_cache, table = pages()
    whole = ours.flash_attn_func(Q, K, V, causal=True)
    options = {"page_table": table, "causal": True, "cache_seqlens": int32(20, 20)}
    out = theirs.flash_attn_with_kvcache(Q[:, 18:], k_cache, v_cache, **options)
    assert bits_equal(out, whole[:, 18:])
    q = torch.cat([Q[0, 19:], Q[1, 17:]])
    options |= {"cu_seqlens_q": int32(0, 1, 4), "max_seqlen_q": 3}
    out, lse = theirs.flash_attn_with_kvcache(
        q, k_cache, v_cache, return_softmax_lse=True, **options
    )
    assert bits_equal(out, torch.cat([whole[0, 19:], whole[1, 17:]]))
    assert lse.shape == (4, 4)
    options |= {"k_descale": torch.tensor([2.0, 0.5]), "v_descale": torch.ones(2)}
    out = theirs.flash_attn_with_kvcache(q, *(c.to(FP8) for c in (k_cache, v_cache)), **options)
    scales = torch.tensor([2.0, 2.0, 0.5, 0.5], dtype=q.dtype)[:, None]
    del options["k_descale"], options["v_descale"]
    converted = (cache.to(FP8).to(q.dtype) for cache in (k_cache, v_cache))
    assert bits_equal(out, theirs.flash_attn_with_kvcache(q * scales, *converted, **options))


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="qv: expected its default"):
        theirs.flash_attn_func(Q, K, V, qv=Q)
    with pytest.raises(UnsupportedError, match="attention_chunk"):
        theirs.flash_attn_func(Q, K, V, attention_chunk=64)
    k_cache, v_cache, _ = pages()
    with pytest.raises(ArgumentError, match="cu_seqlens_q: expected together with"):
        theirs.flash_attn_with_kvcache(Q[0], k_cache, v_cache, cu_seqlens_q=int32(0, 20))


def test_the_alias_holds_it() -> None:
    with as_flash_attn():
        import flash_attn_interface  # type: ignore[import-not-found, unused-ignore]
        from flash_attn_3.flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found, unused-ignore]
    assert flash_attn_interface is flash_attn_3
    assert flash_attn_with_kvcache is flash_attn_3.flash_attn_with_kvcache
    assert "page_table" in inspect.signature(flash_attn_with_kvcache).parameters
