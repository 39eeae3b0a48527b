"""Arguments of a cache, and of keys and values to append."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import int32, kvcache_call, normal
from flash_attn_deterministic.checks import kernels
from flash_attn_deterministic.checks.kernels import check_rows_aligned
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
            {"q": normal(2, 5, 4, 32), "cache_seqlens": 16}, ArgumentError,
            "rotary_cos: expected a seqlen_ro of at least 21, because the last query has "
            "position 20, got 20", id="rotary-more-queries",
        ),
        pytest.param(
            {"q": normal(2, 5, 4, 32), "causal": False, "window_size": (2, -1),
             "cache_seqlens": 17},
            ArgumentError, "rotary_cos: .* at least 22", id="rotary-more-queries-window",
        ),
        pytest.param(
            {"k": normal(2, 0, 2, 32), "v": normal(2, 0, 2, 32), "causal": False,
             "cache_seqlens": 20}, ArgumentError,
            "rotary_cos: expected a seqlen_ro of at least 21", id="rotary-nothing-new",
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


@pytest.mark.parametrize("leftpad", [None, int32(2, 1)], ids=["", "leftpad"])
@pytest.mark.parametrize("lengths", [15, int32(15, 4)], ids=["int", "tensor"])
@pytest.mark.parametrize(
    "masked",
    [{"causal": True}, {"causal": False, "window_size": (2, -1)}, {"causal": False}],
    ids=["causal", "window", "full"],
)
def test_rotary_tables_as_long_as_the_cache_and_more_queries_than_new_keys(
    masked: dict[str, Any], lengths: Any, leftpad: torch.Tensor | None
) -> None:
    """The last query is at position 19, so no row beyond the tables is read."""
    arguments = {**masked, "q": normal(2, 5, 4, 32), "cache_seqlens": lengths}
    arguments["cache_leftpad"] = leftpad
    out = kvcache_call()(**arguments)
    nan = torch.full((9, 8), math.nan, dtype=torch.bfloat16)
    longer = {"rotary_cos": torch.cat([normal(20, 8, seed=5), nan])}
    longer["rotary_sin"] = torch.cat([normal(20, 8, seed=6), nan])
    assert bits_equal(out, kvcache_call()(**arguments, **longer))


def test_full_cache_without_new_keys() -> None:
    out = kvcache_call()(**READ_ONLY, cache_seqlens=20)
    assert bits_equal(out, kvcache_call()(**{**READ_ONLY, "cache_seqlens": None}))


def test_new_key_at_the_last_place_of_the_cache() -> None:
    call = kvcache_call()
    call(cache_seqlens=17)
    assert bits_equal(call.arguments["v_cache"][:, 17:], call.arguments["v"])


def test_more_queries_than_new_keys_with_a_longer_table() -> None:
    q = normal(2, 5, 4, 32)
    table = {"rotary_cos": normal(22, 8, seed=5), "rotary_sin": normal(22, 8, seed=6)}
    full = {"q": q, "cache_seqlens": 17}
    assert kvcache_call()(**full, **table).shape == q.shape
    # Without causal or a window all queries have position cache_seqlens.
    assert kvcache_call()(**full, causal=False).shape == q.shape


# --- Values of lengths and indices --------------------------------------------------------------


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"cache_seqlens": int32(9, -4)},
            "cache_seqlens: expected 0 to 17, the 20 tokens of the cache less 3 new ones, for "
            "sequence 1, got -4", id="seqlens-negative",
        ),
        pytest.param(
            {"cache_seqlens": int32(18, 4)}, "cache_seqlens: expected 0 to 17, .* 0, got 18",
            id="seqlens-no-room",
        ),
        pytest.param(
            {**READ_ONLY, "cache_seqlens": int32(20, 21)},
            "cache_seqlens: expected 0 to 20, .* 1, got 21", id="seqlens-beyond",
        ),
        pytest.param(
            {"q": normal(2, 5, 4, 32), "cache_seqlens": int32(15, 16)},
            "rotary_cos: expected a seqlen_ro of at least 21, because the last query has "
            "position 20 in sequence 1, got 20", id="rotary-beyond",
        ),
        pytest.param(
            {"cache_batch_idx": int32(0, 2)},
            "cache_batch_idx: expected 0 to 1, the places in the cache, for sequence 1, got 2",
            id="batch-idx-beyond",
        ),
        pytest.param(
            {"cache_batch_idx": int32(-1, 0)}, "cache_batch_idx: expected 0 to 1, .* 0, got -1",
            id="batch-idx-negative",
        ),
        pytest.param(
            {"cache_leftpad": int32(0, -1)},
            "cache_leftpad: expected 0 to 7, the length, for sequence 1, got -1",
            id="leftpad-negative",
        ),
        pytest.param(
            {"cache_leftpad": int32(0, 8)}, "cache_leftpad: expected 0 to 7, .* 1, got 8",
            id="leftpad-beyond",
        ),
        pytest.param(
            {**PAGES, "block_table": int32(0, 1, 2, 4).view(2, 2), "cache_seqlens": int32(9, 14)},
            "block_table: expected pages 0 to 3, got 4 for sequence 1", id="page-beyond",
        ),
        pytest.param(
            {**PAGES, "block_table": int32(0, 1, -1, 3).reshape(2, 2)},
            "block_table: expected pages 0 to 3, got -1 for sequence 1", id="page-negative",
        ),
    ],
)  # fmt: skip
def test_wrong_values(changes: dict[str, Any], message: str, compiles: bool) -> None:
    torch._dynamo.reset()
    call = kvcache_call()
    arguments = {**call.arguments, **changes}
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    function = call.function
    if compiles:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(ArgumentError, match=message):
        function(**arguments)
    for name, cache in before.items():
        assert bits_equal(arguments[name], cache)


def test_unused_pages_are_not_checked() -> None:
    table = int32(0, -1, 2, 99).reshape(2, 2)
    lengths = {"cache_seqlens": int32(9, 13)}
    out = kvcache_call()(**{**PAGES, **lengths, "block_table": table})
    assert bits_equal(out, kvcache_call()(**{**PAGES, **lengths}))


@pytest.mark.parametrize("new", [False, True], ids=["read-only", "append"])
def test_cache_with_more_rows_than_the_batch(new: bool) -> None:
    options: dict[str, Any] = {} if new else READ_ONLY
    sliced = kvcache_call()
    caches = {
        name: torch.cat([sliced.arguments[name], normal(3, 20, 2, 32, seed=9)])
        for name in ("k_cache", "v_cache")
    }
    rest = {name: cache[2:].clone() for name, cache in caches.items()}
    longer = kvcache_call()(**caches, **options, return_softmax_lse=True)
    expected = sliced(**options, return_softmax_lse=True)
    assert all(bits_equal(a, b) for a, b in zip(longer, expected, strict=True))
    for name, cache in caches.items():
        assert bits_equal(cache[:2], sliced.arguments[name])
        assert bits_equal(cache[2:], rest[name])


# --- Alignment for CUDA kernels -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        pytest.param(
            normal(2, 20, 2, 36)[..., :32], r"multiples of 8 elements, got strides \(1440, 72, 36",
            id="heads",
        ),
        pytest.param(
            torch.zeros(2 * 20 * 64 + 2, dtype=torch.bfloat16)[1:-1].view(2, 20, 2, 32)
            .as_strided((2, 20, 2, 32), (1281, 64, 32, 1)),
            r"got strides \(1281, ", id="batch",
        ),
        pytest.param(
            torch.zeros(2 * 20 * 64 + 4, dtype=torch.bfloat16)[4:].view(2, 20, 2, 32),
            r"got a first row 8 bytes after a multiple \(storage_offset 4\)", id="address",
        ),
    ],
)  # fmt: skip
def test_misaligned_rows(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(
        ArgumentError, match=f"k_cache: expected rows that start at multiples of 16 .*{message}"
    ):
        check_rows_aligned("k_cache", cache)
    # The CPU has no such restriction.
    call = kvcache_call()
    contiguous = call(k_cache=cache.clone(memory_format=torch.contiguous_format))
    assert bits_equal(kvcache_call()(k_cache=cache), contiguous)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(CACHE, id="contiguous"),
        pytest.param(normal(2, 20, 3, 40)[:, :, 1:, 8:], id="slice"),
        pytest.param(normal(1, 20, 1, 32).as_strided((1, 20, 1, 32), (7, 32, 5, 1)), id="one"),
        pytest.param(normal(2, 20, 2, 36).to("meta")[..., :32], id="meta-checked-by-the-op"),
    ],
)
def test_aligned_rows(cache: torch.Tensor) -> None:
    if cache.device.type == "meta":
        cache = torch._subclasses.FakeTensorMode().from_tensor(cache)
    check_rows_aligned("k_cache", cache)


@pytest.mark.parametrize(
    ("head_dim", "device", "asked"),
    [
        pytest.param(32, "cuda", ["k_cache", "v_cache"], id="cuda"),
        pytest.param(32, "cpu", [], id="cpu"),
    ],
)
def test_alignment_is_checked_for_cuda_kernels_only(
    head_dim: int, device: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    before: list[list[str]] = []

    def stop(*arguments: Any) -> None:
        before.append(names.copy())
        raise KeyError("the op")

    monkeypatch.setattr(kernels, "check_rows_aligned", lambda name, cache: names.append(name))
    monkeypatch.setattr(torch.ops.flash_attn_deterministic, "kvcache_fwd", stop)
    monkeypatch.setattr(kernels, "check_kernels", lambda *arguments: None)
    call = kvcache_call(head_dim)
    with torch._subclasses.FakeTensorMode():
        fakes = {
            name: torch.empty(x.shape, dtype=x.dtype, device=device) if torch.is_tensor(x) else x
            for name, x in call.arguments.items()
        }
        with pytest.raises(KeyError, match="the op"):
            call.function(**fakes)
    assert before == [[]]
    assert names == asked


@pytest.mark.parametrize("head_dim", [32, 20], ids=["aligned", "padded"])
def test_cache_made_in_inference_mode(head_dim: int) -> None:
    call = kvcache_call(head_dim)
    expected = call()
    names = ("k_cache", "v_cache")
    with torch.inference_mode():
        caches = {name: kvcache_call(head_dim).arguments[name].clone() for name in names}
    out = kvcache_call(head_dim)(**caches)
    assert bits_equal(out, expected)
    for name, cache in caches.items():
        assert bits_equal(cache, call.arguments[name])
