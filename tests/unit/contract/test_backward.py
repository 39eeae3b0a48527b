"""What gradients' bits don't depend on, besides the rows of `verify`'s contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import drawn, same, tiles
from bits import all_equal
from flash_attn_deterministic import tree
from flash_attn_deterministic.reference import attention, attention_backward, backward, batch
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.call import Call, Tensors
from flash_attn_deterministic.verify.features import OF_CONTRACT

# Ragged, with empty sequences of either kind; more queries than keys, fewer, and as many.
RAGGED = [(0, 5), (17, 17), (1, 65), (3, 0), (0, 0), (64, 63), (16, 129), (20, 7), (1, 65)]
features = pytest.mark.parametrize("feature", OF_CONTRACT)


def seeded(call: Call) -> Tensors:
    torch.manual_seed(11)
    return call.gradients()


# --- varlen -------------------------------------------------------------------------------------


@features
@pytest.mark.parametrize("order", [1, -1], ids=["as-is", "reversed"])
def test_packed_is_dense(feature: str, order: int) -> None:
    lengths_q, lengths_k = zip(*RAGGED[::order], strict=True)
    call = drawn(feature, len(RAGGED), max(lengths_q), max(lengths_k))
    for one, own in layouts.packed(call, lengths_q, lengths_k, gradients=True).parts:
        assert same(own, one.gradients())


# --- schedule -----------------------------------------------------------------------------------


@features
@tiles
def test_tiles(feature: str, elements: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "CHUNK_ROWS", 8)  # dk and dv are sums of three chunks
    call = drawn(feature, 2, 20, 37)
    usual = call.gradients()
    monkeypatch.setattr(batch, "_TILE_ELEMENTS", elements)
    monkeypatch.setattr(batch, "_MAX_TILE_ROWS", rows)
    assert same(usual, call.gradients())


@features
def test_blocks(feature: str) -> None:
    call = drawn(feature, 1, 20, 70)
    names = {"window_size": "window"}
    options: dict[str, Any] = {names.get(n, n): x for n, x in call.keywords.items()}
    del options["split_size"]
    qkv = call.q, call.k, call.v
    out = attention(*qkv, **options)
    results = [
        attention_backward(call.dout, *qkv, *out, **options, block_n=block_n)
        for block_n in (4, 16, 64)
    ]
    assert all_equal(results[0], results[1])
    assert all_equal(results[0], results[2])


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_TILE_ELEMENTS", 1 << 17)
    call = drawn("everything", 2, 40, 129)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append({**call(), **call.gradients()})
    finally:
        torch.set_num_threads(before)
    assert all(same(results[0], result) for result in results[1:])


def test_strides() -> None:
    call = drawn("causal", 2, 20, 33)
    names = ("q", "k", "v", "dout")
    strided = {n: getattr(call, n).transpose(1, 2).contiguous().transpose(1, 2) for n in names}
    assert not strided["dout"].is_contiguous()
    assert same(call.gradients(), replace(call, **strided).gradients())


# --- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", ["dropout", "dropout-causal", "dropout-window"])
def test_dropout_follows_the_index_in_the_batch(feature: str) -> None:
    call = drawn(feature, 3, 20, 37)
    result = seeded(call)
    assert same(result, seeded(call))
    first = slice(0, 2)
    assert same(seeded(call.sequences(first)), {name: x[first] for name, x in result.items()})
    torch.manual_seed(12)
    assert not same(result, call.gradients())
    torch.manual_seed(11)
    packed = layouts.packed(call, [20] * 3, [37] * 3, gradients=True).parts
    for index, (_, own) in enumerate(packed):
        assert same(own, {name: x[index : index + 1] for name, x in result.items()})


# --- The tests can fail -------------------------------------------------------------------------


def _matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    total += left @ right


def test_a_matmul_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sums in a matmul depends on the shape, which the tests above detect."""
    monkeypatch.setattr(backward, "add_products", _matmul)
    call = drawn("full", 1, 300, 300, head_dim=64)
    usual = call.gradients()
    monkeypatch.setattr(batch, "_TILE_ELEMENTS", 1)
    monkeypatch.setattr(batch, "_MAX_TILE_ROWS", 1)
    assert not same(usual, call.gradients())
