"""Document masks of flex_attention: the same attention, or refused."""

from __future__ import annotations

from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from flash_attn_deterministic.errors import ArgumentError, UnsupportedError
from flash_attn_deterministic.integrations import flex
from torch.nn.attention.flex_attention import create_block_mask, create_mask

BATCH, HEADS, HEADS_K, SEQLEN, HEAD_DIM = 2, 4, 2, 96, 32
IDS = torch.tensor([[0] * 40 + [1] * 1 + [2] * 55, [0] * 96])
dense_func: Any = package.flash_attn_func
varlen_func: Any = package.flash_attn_varlen_func


def causal_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (IDS[b, q] == IDS[b, k]) & (q >= k)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return IDS[b, q] == IDS[b, k]


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 9)


def repeated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q // 32 % 2 == k // 32 % 2


def block_mask(mask_mod: Any, batch: int | None = BATCH, heads: int | None = None) -> Any:
    return create_block_mask(mask_mod, batch, heads, SEQLEN, SEQLEN, device="cpu")


def draw(heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(BATCH, heads, SEQLEN, HEAD_DIM, generator=generator)
    return tensor.to(torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_packed_sequences(causal: bool) -> None:
    q, k, v = draw(HEADS, 0), draw(HEADS_K, 1), draw(HEADS_K, 2)
    mask = block_mask(causal_documents if causal else documents)
    out = flex.flex_attention(q, k, v, block_mask=mask, scale=0.2, enable_gqa=True)
    starts = torch.tensor([0, 40, 41, 96, 192], dtype=torch.int32)
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    same = varlen_func(*packed, starts, starts, 96, 96, softmax_scale=0.2, causal=causal)
    assert bits_equal(out, same.unflatten(0, (BATCH, SEQLEN)).transpose(1, 2))
    exact = [t.detach().float() for t in (q, k, v)]
    dense = create_mask(mask.mask_mod, BATCH, 1, SEQLEN, SEQLEN, device="cpu")
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    expected = attention(*exact, attn_mask=dense, scale=0.2, enable_gqa=True)
    assert (out.float() - expected).abs().max() < 0.02
    torch.autograd.backward(out.sum())
    assert q.grad is not None
    assert k.grad is not None
    assert bool(k.grad.any())


def test_without_a_mask_rows_are_documents() -> None:
    q, k, v = (draw(HEADS, seed) for seed in range(3))
    dense = [t.transpose(1, 2) for t in (q, k, v)]
    assert bits_equal(flex.flex_attention(q, k, v), dense_func(*dense).transpose(1, 2))


def test_a_mask_for_any_batch_serves_several() -> None:
    q = draw(HEADS, 0)
    mask = create_block_mask(
        lambda b, h, q, k: (IDS[0, q] == IDS[0, k]) & (q >= k), None, None, SEQLEN, SEQLEN, "cpu"
    )
    whole = flex.flex_attention(q, q, q, block_mask=mask)
    first = flex.flex_attention(q[:1], q[:1], q[:1], block_mask=mask)
    assert bits_equal(first, whole[:1])


@pytest.mark.parametrize("mask_mod", [window, repeated])
def test_other_masks_are_refused(mask_mod: Any) -> None:
    q = draw(HEADS, 0)
    with pytest.raises(UnsupportedError, match="block_mask: expected documents"):
        flex.flex_attention(q, q, q, block_mask=block_mask(mask_mod))


def test_arguments_are_refused() -> None:
    q = draw(HEADS, 0)
    with pytest.raises(UnsupportedError, match="score_mod"):
        flex.flex_attention(q, q, q, score_mod=lambda score, *_: score)
    with pytest.raises(ArgumentError, match="block_mask: expected shape"):
        flex.flex_attention(q, q, q, block_mask=block_mask(documents, heads=HEADS))
    mask = block_mask(documents)
    flex.flex_attention(q, q, q, block_mask=mask)
    with pytest.raises(ArgumentError, match="block_mask: expected 1 rows of 96"):
        flex.flex_attention(q[:1], q[:1], q[:1], block_mask=mask)
    with pytest.raises(ArgumentError, match="enable_gqa"):
        flex.flex_attention(q, q[:, :2], q[:, :2])
