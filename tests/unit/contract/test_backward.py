"""What the reference's bits don't depend on, besides the rows of `verify`'s contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import make_inputs
from backward_cases import (
    BACKWARD_FEATURES,
    BackwardCall,
    make_backward,
    packed_backward,
    ragged_backwards,
)
from bits import all_equal, bits_equal
from contract_cases import Call, make_call
from flash_attn_deterministic.reference import backward, batch

features = pytest.mark.parametrize("feature", BACKWARD_FEATURES)
# --- varlen -------------------------------------------------------------------------------------


def _alone(calls: list[BackwardCall]) -> Iterator[tuple[torch.Tensor, ...]]:
    for call in calls:
        yield tuple(x[0] for x in call())


@features
@pytest.mark.parametrize("order", ["as-is", "reversed"])
def test_packed_is_dense(feature: str, order: str) -> None:
    calls = ragged_backwards(feature)
    if order == "reversed":
        calls.reverse()
    packed, starts_q, starts_k = packed_backward(calls)
    for b, expected in enumerate(_alone(calls)):
        rows = slice(int(starts_q[b]), int(starts_q[b + 1]))
        keys = slice(int(starts_k[b]), int(starts_k[b + 1]))
        assert all_equal((packed[0][rows], packed[1][keys], packed[2][keys]), expected)


def test_gradients_of_tokens_of_no_sequence_are_zero() -> None:
    calls = ragged_backwards("causal")
    packed, starts_q, starts_k = packed_backward(calls, spare=3)
    expected, _, _ = packed_backward(calls)
    for tensor, plain, starts in zip(packed, expected, (starts_q, starts_k, starts_k), strict=True):
        end = int(starts[-1])
        assert bits_equal(tensor[:end], plain)
        assert bits_equal(tensor[end:], torch.zeros_like(tensor[end:]))


# --- schedule -----------------------------------------------------------------------------------


@features
@pytest.mark.parametrize(
    ("elements", "rows"),
    [
        pytest.param(1, 1, id="row-by-row"),
        pytest.param(3000, 7, id="odd-cut"),
        pytest.param(1 << 30, 1 << 30, id="all-at-once"),
    ],
)
def test_tiles(feature: str, elements: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_backward(feature, 2, 20, 37)
    usual = call()
    monkeypatch.setattr(batch, "_TILE_ELEMENTS", elements)
    monkeypatch.setattr(batch, "_MAX_TILE_ROWS", rows)
    assert all_equal(usual, call())


@features
@pytest.mark.parametrize("block_n", [4, 64])
def test_blocks(feature: str, block_n: int) -> None:
    call = make_backward(feature, 1, 20, 70)
    options = {**call.forward.options, "block_n": block_n}
    other = replace(call, forward=replace(call.forward, options=options))
    assert all_equal(call(), other())


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads: int) -> None:
    call = make_backward("everything", 2, 40, 129)
    usual = call()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all_equal(usual, call())
    finally:
        torch.set_num_threads(before)


def test_strides() -> None:
    call = make_backward("causal", 2, 20, 33)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    forward = call.forward
    other = replace(
        call,
        forward=replace(forward, q=strided(forward.q), k=strided(forward.k), v=strided(forward.v)),
        dout=strided(call.dout),
        out=strided(call.out),
    )
    assert not other.dout.is_contiguous()
    assert all_equal(call(), other())


# --- dropout ------------------------------------------------------------------------------------

RNG: dict[str, Any] = {"dropout_p": 0.3, "rng_state": torch.tensor([11, 12])}


@pytest.mark.parametrize("feature", ["causal", "everything"])
def test_dropout_repeats_in_every_batch(feature: str) -> None:
    call = BackwardCall.of(make_call(feature, 3, 20, 37), **RNG)
    result = call()
    assert all_equal(result, call())
    # The mask follows the index in the batch.
    assert all_equal([x[:2] for x in result], call.sequences(slice(0, 2))())
    other = BackwardCall.of(call.forward, **{**RNG, "rng_state": torch.tensor([11, 13])})
    assert not all_equal(result, other())


@pytest.mark.parametrize("feature", ["causal", "everything"])
def test_dropout_of_packed_sequences(feature: str) -> None:
    forward = make_call(feature, 3, 20, 37)
    whole = BackwardCall.of(forward, **RNG)
    dq, dk, dv = whole()
    packed, _, _ = packed_backward([whole.sequences(slice(b, b + 1)) for b in range(3)])
    assert all_equal([x.flatten(0, 1) for x in (dq, dk, dv)], packed)


# --- The tests can fail -------------------------------------------------------------------------


def _matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    total += left @ right


def test_a_matmul_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sums in a matmul depends on the shape, which the tests above detect."""
    monkeypatch.setattr(backward, "add_products", _matmul)
    q, k, v = make_inputs(1, 300, 300, 1, 1, 64, torch.float32)
    call = BackwardCall.of(Call(q, k, v))
    usual = call()
    monkeypatch.setattr(batch, "_TILE_ELEMENTS", 1)
    monkeypatch.setattr(batch, "_MAX_TILE_ROWS", 1)
    assert not all_equal(usual, call())
