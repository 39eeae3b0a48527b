"""Arguments of a cache, and of what is appended to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import int32, kvcache_call, normal
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    FlashAttnError,
)

CACHE = normal(2, 20, 2, 32)
PAGES = {
    "k_cache": normal(4, 16, 2, 32),
    "v_cache": normal(4, 16, 2, 32),
    "block_table": int32(0, 1, 2, 3).reshape(2, 2),
    "rotary_cos": None,
    "rotary_sin": None,
}
READ_ONLY = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({"k_cache": CACHE[0]}, ArgumentError, "k_cache: expected 4 dim", id="rank"),
        pytest.param({"k_cache": CACHE.half()}, DtypeError, "k_cache: expected", id="dtype"),
        pytest.param(
            {"v_cache": CACHE.to("meta")}, ArgumentError, "v_cache: expected a tensor on cpu",
            id="device",
        ),
        pytest.param(
            {"v_cache": CACHE[:, 1:]}, ArgumentError, "v_cache: expected shape .* of k_cache",
            id="v-shape",
        ),
        pytest.param(
            {"k_cache": CACHE.repeat(1, 1, 2, 1)[:, :, :3]}, ArgumentError,
            "k_cache: expected a number of heads that divides the 4 heads of q, got 3", id="heads",
        ),
        pytest.param(
            {"k_cache": CACHE[..., :16]}, ArgumentError, "k_cache: expected a head_dim of 32",
            id="head-dim",
        ),
        pytest.param(
            {"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, ArgumentError,
            "k_cache: expected room for the 2 sequences of q.*cache_batch_idx", id="batch",
        ),
        pytest.param(
            {"k_cache": torch.stack([CACHE, CACHE], -1)[..., 0]}, ArgumentError,
            "k_cache: expected a contiguous last dimension, got strides", id="stride",
        ),
        pytest.param({"k": None}, ArgumentError, "k: expected a tensor together with v", id="no-k"),
        pytest.param({"v": None}, ArgumentError, "v: expected a tensor together with k", id="no-v"),
        pytest.param(
            {"k": normal(2, 3, 4, 32)}, ArgumentError,
            r"k: expected shape \(2, 3, 2, 32\), \(batch, seqlen_new, nheads_k, head_dim\)",
            id="k-heads",
        ),
        pytest.param(
            {"v": normal(2, 4, 2, 32)}, ArgumentError, "v: expected shape .* of k", id="v-length",
        ),
        pytest.param(
            {"k": normal(2, 21, 2, 32), "v": normal(2, 21, 2, 32)}, ArgumentError,
            "k: expected at most the 20 tokens that the cache holds", id="k-too-long",
        ),
        pytest.param(
            {"cache_seqlens": None}, ArgumentError, "cache_seqlens: .* got None", id="no-lengths",
        ),
        pytest.param(
            {"cache_seqlens": 18}, ArgumentError,
            "cache_seqlens: expected 0 to 17, the 20 tokens of the cache less 3 new ones, got 18",
            id="no-room",
        ),
        pytest.param({"cache_seqlens": -1}, ArgumentError, "cache_seqlens: .* -1", id="negative"),
        pytest.param(
            {"cache_seqlens": 4.0}, ArgumentTypeError,
            r"cache_seqlens: expected an int, a torch\.Tensor or None, got float", id="float",
        ),
        pytest.param(
            {"cache_seqlens": int32(4, 9).long()}, DtypeError,
            r"cache_seqlens: expected dtype torch\.int32", id="lengths-dtype",
        ),
        pytest.param(
            {"cache_seqlens": int32(4)}, ArgumentError,
            r"cache_seqlens: expected shape \(batch,\) = \(2,\), got \(1,\)", id="lengths-shape",
        ),
        pytest.param(
            {"cache_batch_idx": int32(0)}, ArgumentError, "cache_batch_idx: expected shape",
            id="batch-idx-shape",
        ),
        pytest.param(
            {"cache_leftpad": torch.zeros(2)}, DtypeError, "cache_leftpad: expected dtype",
            id="leftpad-dtype",
        ),
        pytest.param(
            {**PAGES, "cache_batch_idx": int32(0, 1)}, ArgumentError,
            "cache_batch_idx: expected None together with block_table", id="paged-batch-idx",
        ),
        pytest.param(
            {**PAGES, "cache_leftpad": int32(0, 1)}, ArgumentError,
            "cache_leftpad: expected None together with block_table", id="paged-leftpad",
        ),
        pytest.param(
            {**PAGES, "k_cache": CACHE, "v_cache": CACHE}, ArgumentError,
            "k_cache: expected a page_block_size that is a multiple of 16, got 20", id="page-size",
        ),
        pytest.param(
            {**PAGES, "cache_seqlens": 30}, ArgumentError,
            "cache_seqlens: expected 0 to 29, the 32 tokens", id="paged-no-room",
        ),
        pytest.param(
            {"rotary_sin": None}, ArgumentError,
            "rotary_sin: expected a tensor together with rotary_cos", id="no-sin",
        ),
        pytest.param(
            {"rotary_cos": None}, ArgumentError,
            "rotary_cos: expected a tensor together with rotary_sin", id="no-cos",
        ),
        pytest.param(
            {"k": None, "v": None}, ArgumentError, "rotary_cos: expected None without k and v",
            id="rotary-without-k",
        ),
        pytest.param(
            {"rotary_cos": normal(20, 12), "rotary_sin": normal(20, 12)}, ArgumentError,
            "rotary_cos: expected a rotary_dim that is a multiple of 16 .* got 24", id="rotary-24",
        ),
        pytest.param(
            {"rotary_cos": normal(20, 24), "rotary_sin": normal(20, 24)}, ArgumentError,
            "rotary_cos: .* at most the head_dim 32, got 48", id="rotary-48",
        ),
        pytest.param(
            {"rotary_cos": normal(20, 0), "rotary_sin": normal(20, 0)}, ArgumentError,
            "rotary_cos: .* got 0", id="rotary-0",
        ),
        pytest.param(
            {"rotary_cos": normal(19, 8), "rotary_sin": normal(19, 8)}, ArgumentError,
            "rotary_cos: expected a seqlen_ro of at least the 20 tokens", id="rotary-short",
        ),
        pytest.param(
            {"rotary_sin": normal(21, 8)}, ArgumentError, "rotary_sin: expected shape",
            id="sin-shape",
        ),
        pytest.param(
            {"rotary_cos": normal(20, 8).float()}, DtypeError,
            r"rotary_cos: expected torch\.bfloat16, the dtype of q", id="rotary-dtype",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(
    changes: dict[str, Any], error: type[FlashAttnError], message: str
) -> None:
    call = kvcache_call()
    before = call.arguments["k_cache"].clone()
    with pytest.raises(error, match=message):
        call(**changes)
    assert bits_equal(call.arguments["k_cache"], before)


def test_cache_may_be_full_where_nothing_is_appended() -> None:
    out = kvcache_call()(**READ_ONLY, cache_seqlens=20)
    assert bits_equal(out, kvcache_call()(**{**READ_ONLY, "cache_seqlens": None}))


def test_last_place_of_the_cache_can_be_taken() -> None:
    call = kvcache_call()
    call(cache_seqlens=17)
    assert bits_equal(call.arguments["v_cache"][:, 17:], call.arguments["v"])
