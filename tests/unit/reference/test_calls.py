"""What calls do that drawn calls do not tell: roundings, positions and the order of operations.

Drawn calls of every layout: tests/unit/verify/test_accuracy.py, by tests/drawn.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import make_inputs, softmax_attention
from bits import bits_equal
from calls import int32
from flash_attn_deterministic.reference import attention, ieee, kvcache_attention
from flash_attn_deterministic.verify.contract.call import garbage
from flash_attn_deterministic.verify.exact import rotated

BLOCK_N = 16


# --- Rotary -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rotation_rounds_each_product_to_float32(interleaved: bool, dtype: torch.dtype) -> None:
    _, k, v = make_inputs(1, 0, 3, 2, 2, 40, dtype)
    angles = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    k_cache, v_cache = garbage((1, 9, 2, 40), k), garbage((1, 9, 2, 40), k)
    options: Any = {} if interleaved else {"rotary_interleaved": False}
    kvcache_attention(
        k, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5,
        block_n=BLOCK_N, **options,
    )  # fmt: skip
    for j in range(3):
        for pair in range(16):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 16)
            x, y = k[0, j, :, a].float(), k[0, j, :, b].float()
            c, s = cos[5 + j, pair].float(), sin[5 + j, pair].float()
            assert bits_equal(k_cache[0, 5 + j, :, a], (x * c - y * s).to(dtype))
            assert bits_equal(k_cache[0, 5 + j, :, b], (x * s + y * c).to(dtype))
    assert bits_equal(k_cache[0, 5:8, :, 32:], k[0, :, :, 32:])
    assert bits_equal(v_cache[0, 5:8], v[0])


def rotated_query(**arguments: Any) -> torch.Tensor:
    """out of a query that sees one old and three new keys; each position has its own angle."""
    q, k, v = make_inputs(1, 3, 3, 1, 1, 16, torch.float64)
    angles = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 8)
    cache = torch.ones(1, 4, 1, 16, dtype=torch.float64)
    out, _ = kvcache_attention(
        q, cache, cache.clone(), k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=1, block_n=BLOCK_N, **arguments,
    )  # fmt: skip
    return out


def test_queries_turn_with_a_window_however_wide() -> None:
    """Upstream takes a window wider than the cache for none, and the angles with it."""
    wide = rotated_query(window=(1000, 1000))
    assert bits_equal(wide, rotated_query(window=(4, 4)))
    assert not bits_equal(wide, rotated_query(window=(-1, -1)))
    for one_sided, other in (((0, -1), (0, 7)), ((-1, 0), (7, 0))):
        assert bits_equal(rotated_query(window=one_sided), rotated_query(window=other))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rotary_positions_count_the_leftpad(causal: bool) -> None:
    q, k, v = make_inputs(1, 3, 9, 1, 1, 16, torch.float64)
    new_k, new_v = k[:, 6:], v[:, 6:]
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * torch.linspace(0.1, 1.0, 8)
    k_cache, v_cache = garbage((1, 9, 1, 16), k), garbage((1, 9, 1, 16), v)
    k_cache[:, 2:6], v_cache[:, 2:6] = k[:, 2:6], v[:, 2:6]
    result = kvcache_attention(
        q, k_cache, v_cache, new_k, new_v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=6, cache_leftpad=int32(2), causal=causal, rotary_interleaved=False,
        block_n=BLOCK_N,
    )  # fmt: skip
    cos, sin, last = angles.cos(), angles.sin(), torch.arange(6, 9)
    turned_k = rotated(new_k[0], cos, sin, last, False)
    turned_q = rotated(q[0], cos, sin, last if causal else last[[0, 0, 0]], False)
    torch.testing.assert_close(k_cache[0, 6:], turned_k, rtol=0, atol=1e-13)
    keys = torch.cat([k[0, 2:6], turned_k])[None]
    exact = softmax_attention(turned_q[None], keys, v[:, 2:], causal=causal)
    torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-11)


# --- Order of operations ------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["uncapped", "capped"])
def test_softcap_and_alibi_come_before_the_mask_in_this_order(softcap: float) -> None:
    """A row with one key: softmax_lse is its score."""
    q, k, v = make_inputs(1, 1, 9, 1, 1, 16)
    slope, scale = torch.tensor([0.37]), torch.tensor(0.25)
    key = 4
    _, softmax_lse = attention(
        q, k[:, : key + 1], v[:, : key + 1], softmax_scale=0.25, window=(0, 0), softcap=softcap,
        alibi_slopes=slope, block_n=BLOCK_N,
    )  # fmt: skip
    score = torch.tensor(0.0)
    for d in range(16):
        score = score + q[0, 0, 0, d].float() * k[0, key, 0, d].float()
    factor = scale
    if softcap:
        factor = torch.tensor(softcap)
        score = ieee.tanh((score * (scale / factor)).reshape(1))[0]
    score = score - slope[0] / factor * 0.0
    assert bits_equal(softmax_lse[0, 0, 0], score * factor)

    scores: Any = {"softmax_scale": 0.25, "softcap": softcap, "alibi_slopes": slope}
    _, two = attention(q, k[:, :2], v[:, :2], **scores, block_n=BLOCK_N)
    exact = softmax_attention(q, k[:, :2], v[:, :2], **scores)
    torch.testing.assert_close(two.double(), exact[1], rtol=1e-6, atol=1e-6)
