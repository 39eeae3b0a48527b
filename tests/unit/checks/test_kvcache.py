"""Arguments of a cache, and of keys and values to append."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bits import all_equal, bits_equal
from calls import PAGES, READ_ONLY, int32, kvcache_call, normal
from flash_attn_deterministic.checks import kernels
from flash_attn_deterministic.checks.kernels import check_rows_aligned
from flash_attn_deterministic.errors import ArgumentError

CACHE = normal(2, 20, 2, 32)


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
    assert all_equal(longer, expected)
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


@pytest.mark.parametrize("cache", [
    pytest.param(CACHE, id="contiguous"),
    pytest.param(normal(2, 20, 3, 40)[:, :, 1:, 8:], id="slice"),
    pytest.param(normal(1, 20, 1, 32).as_strided((1, 20, 1, 32), (7, 32, 5, 1)), id="one"),
    pytest.param(normal(2, 20, 2, 36).to("meta")[..., :32], id="meta-checked-by-the-op"),
])  # fmt: skip
def test_aligned_rows(cache: torch.Tensor) -> None:
    if cache.device.type == "meta":
        cache = torch._subclasses.FakeTensorMode().from_tensor(cache)
    check_rows_aligned("k_cache", cache)


@pytest.mark.parametrize(
    ("device", "asked"), [("cuda", ["k_cache", "v_cache"]), ("cpu", [])], ids=["cuda", "cpu"]
)
def test_alignment_is_checked_for_cuda_kernels_only(
    device: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the op has refused a call."""
    names: list[str] = []

    def refuse(*arguments: Any) -> None:
        raise KeyError("the op")

    monkeypatch.setattr(torch.ops.flash_attn_deterministic, "kvcache_fwd", refuse)
    monkeypatch.setattr(kernels, "check_rows_aligned", lambda name, cache: names.append(name))
    monkeypatch.setattr(kernels, "check_kernels", lambda *arguments: None)
    call = kvcache_call()
    with torch._subclasses.FakeTensorMode(), pytest.raises(KeyError, match="the op"):
        call(
            **{
                name: torch.empty(x.shape, dtype=x.dtype, device=device)
                for name, x in call.arguments.items()
                if torch.is_tensor(x)
            }
        )
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
