"""What a row's bits don't depend on, besides the rows of `verify`'s contract."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import drawn, same, tiles
from bits import all_equal, bits_equal
from flash_attn_deterministic.reference import State, attention, batch, forward
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.call import garbage, part
from flash_attn_deterministic.verify.features import CAUSAL, OF_CONTRACT

features = pytest.mark.parametrize("feature", OF_CONTRACT)
causal_features = pytest.mark.parametrize(
    "feature", [name for name in OF_CONTRACT if name in CAUSAL]
)


# --- chunk --------------------------------------------------------------------------------------


@causal_features
def test_chunks_of_every_length(feature: str) -> None:
    """Queries at the end of longer keys."""
    call = drawn(feature, 1, 35, 67)
    whole = call()
    for begin in range(0, 35, 5):
        for size in (1, 2, 3, 16, 17):
            end = min(begin + size, 35)
            chunk = call.queries(begin, end).keys(end + 67 - 35)
            assert same(chunk(), part(whole, q=slice(begin, end)))


@causal_features
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_cache_filled_in_chunks(feature: str, interleaved: bool) -> None:
    """Appending all tokens at once, some at a time or one by one, with rotary embedding."""
    call = drawn(feature, 2, 67, 67)
    angle = torch.arange(80.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01, 0.7, 0.2, 0.05, 0.02])
    options: dict[str, Any] = {
        "rotary_cos": angle.cos().to(call.q.dtype), "rotary_sin": angle.sin().to(call.q.dtype),
        "rotary_interleaved": interleaved, "return_softmax_lse": True, **call.keywords,
    }  # fmt: skip
    results = []
    for cuts in ([0, 67], [0, 15, 16, 49, 67], [0, 1, 2, 3, 64, 65, 66, 67]):
        caches = [garbage((2, 80, 2, 16), call.q) for _ in "kv"]
        chunks = [
            call.attention.kvcache(
                call.q[:, begin:end],
                *caches,
                call.k[:, begin:end],
                call.v[:, begin:end],
                cache_seqlens=begin,
                **options,
            )
            for begin, end in itertools.pairwise(cuts)
        ]
        out, softmax_lse = zip(*chunks, strict=True)
        results.append((torch.cat(out, dim=1), torch.cat(softmax_lse, dim=2), *caches))
    for result in results[1:]:
        assert all_equal(results[0], result)


# --- decode -------------------------------------------------------------------------------------


@causal_features
def test_a_mask_that_hides_nothing_equals_no_mask(feature: str) -> None:
    call = drawn(feature, 2, 67, 67).queries(66, 67)
    left, _ = call.options.get("window_size", (-1, -1))
    assert same(call(), call.with_options(causal=False, window_size=(left, -1))())


# --- varlen -------------------------------------------------------------------------------------


def test_sequences_go_together_by_their_lengths() -> None:
    """9 keys, and 5 behind a pad of 2: what 2 pads and 5 keys add up to is no length."""
    call = drawn("causal", 2, 3, 9)
    packed = layouts.packed(call, [3, 3], [9, 5], room=12, leftpad=2).parts
    cached = layouts.cached(call, [9, 5], room=12, leftpad=2)
    for one, own in (*packed, *cached):
        assert same(one(), own)


# --- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", ["alibi", "everything"])
def test_slopes_per_head_are_slopes_per_batch_and_head(feature: str) -> None:
    call = drawn(feature, 2, 9, 70)
    assert call.slopes is not None
    per_head = call.slopes[0]
    assert same(
        replace(call, slopes=per_head)(), replace(call, slopes=torch.stack([per_head] * 2))()
    )


# --- schedule -----------------------------------------------------------------------------------


@features
@pytest.mark.parametrize("length", [17, 63, 64, 65, 129], ids=lambda length: f"L{length}")
@tiles
def test_tiles(
    feature: str, length: int, elements: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each row is a walk of its own here, which takes long: only the last rows.
    call = drawn(feature, 1, length, length).queries(max(0, length - 20), length)
    usual = call()
    monkeypatch.setattr(batch, "_TILE_ELEMENTS", elements)
    monkeypatch.setattr(batch, "_MAX_TILE_ROWS", rows)
    assert same(usual, call())


def normalise_and_keep_the_sign_of_zero(
    state: State, scale: float, formats: object, keep_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return state.acc / state.row_sum, torch.log(state.row_sum).squeeze(-1)


@pytest.mark.parametrize("split_size", [0, 4, 8, 16], ids=lambda size: f"split{size}")
def test_hidden_blocks_do_not_change_the_sign_of_zero(
    split_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accumulator of -0 becomes +0 in a hidden block, which a single row does not visit."""
    q = torch.ones(1, 12, 1, 8, dtype=torch.float16)
    k = torch.zeros_like(q)
    v = torch.full_like(q, -1.0)
    v[:, :4] = 1.0
    # This key's score makes all others vanish, and its value gives -0.
    k[:, 5], v[:, 5] = 1000.0, -0.0
    options: dict[str, Any] = {"window": (4, 0), "block_n": 4, "split_size": split_size}

    def alone_and_together() -> tuple[torch.Tensor, torch.Tensor]:
        alone, _ = attention(q[:, 8:9], k[:, :9], v[:, :9], **options)
        return alone, attention(q, k, v, **options)[0][:, 8:9]

    alone, together = alone_and_together()
    assert bits_equal(alone, together)
    assert bits_equal(alone, torch.zeros_like(alone))
    if split_size in (0, 16):  # elsewhere the key is in another split than the row
        monkeypatch.setattr(forward, "normalise", normalise_and_keep_the_sign_of_zero)
        alone, together = alone_and_together()
        assert not bits_equal(alone, together)


def test_nan_is_always_the_same() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (1, 7, 8, 40):
            ones = torch.ones(1, 3, 1, head_dim, dtype=dtype)
            out, _ = attention(ones, garbage(ones.shape, ones), ones, block_n=4)
            assert bits_equal(out, torch.full_like(out, math.nan))


# --- These tests can fail -----------------------------------------------------------------------


def test_positions_count_from_the_sequence_start() -> None:
    """The same visible keys, but not at the same place within their blocks."""
    call = drawn("window-right-0", 2, 1, 129)
    assert not same(call(), replace(call, k=call.k[:, 1:], v=call.v[:, 1:])())
