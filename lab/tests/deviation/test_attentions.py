from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.deviation.attentions.masks import Call
from flash_attn_deterministic_lab.deviation.attentions.registry import find_attention
from flash_attn_deterministic_lab.deviation.attentions.substitute import replaced_attention
from flash_attn_deterministic_lab.errors import ArgumentError, UnavailableError
from torch import nn
from torch.nn import functional

NAMES = ("ours", "ours-atomics", "ours+residual", "sdpa", "sdpa-math", "explicit", "explicit:p24",
         "exact", "paper", "kernel", "kernel:bf16", "kernel+residual", "tree", "fa4-steps",
         "lines+exact", "torch-lines", "torch-lines-shifted")  # fmt: skip
LENGTH = 80  # more than a block of 64 keys
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "mask": {"attn_mask": torch.ones(LENGTH, LENGTH).tril(2).bool()},
    "bias": {"attn_mask": torch.linspace(-3, 0, LENGTH)[None].expand(LENGTH, LENGTH)},
}


def _tensors(heads_k: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (2, heads_k, heads_k, 2)
    return [torch.randn(2, h, LENGTH, 16, generator=generator).to(torch.bfloat16) for h in heads]


def _call(name: str, **options: Any) -> torch.Tensor:
    q, k, v, _ = _tensors()
    return find_attention(name)(q, k, v, **options)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_attention_is_torchs_forward_and_backward(name: str, option: str) -> None:
    options = OPTIONS[option]
    attention: Any = find_attention(name)
    tensors = _tensors(1)
    if name.startswith("ours") and "attn_mask" in options:
        with pytest.raises(UnavailableError, match="takes no masks"):
            attention(*tensors[:3], **options)
        return
    found = []
    wide = {n: v.double() if n == "attn_mask" and v.dtype != torch.bool else v
            for n, v in options.items()}  # fmt: skip
    reference: Any = functional.scaled_dot_product_attention
    for attend, dtype, extra in (
        (reference, torch.float64, wide),
        (attention, torch.bfloat16, options),
    ):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors[:3]]
        out = attend(*leaves, enable_gqa=True, **extra)
        assert out.dtype == dtype
        found.append([out, *torch.autograd.grad(out, leaves, tensors[3].to(dtype))])
    for expected, actual in zip(*found, strict=True):
        assert actual.shape == expected.shape
        error = (actual.detach().double() - expected.detach()).norm() / expected.detach().norm()
        assert float(error) < 0.03, (name, option)


LATER = torch.ones(LENGTH, LENGTH).triu(1) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "scale": 0.5},
        {"attn_mask": ~LATER},
        {"attn_mask": torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(LATER, -math.inf)},
        {"attn_mask": torch.zeros(LENGTH, LENGTH).masked_fill(LATER, -65504.0)},
    ],
    ids=["causal", "mask", "bias", "large"],
)
def test_decode_is_the_same_function_token_by_token(options: dict[str, Any]) -> None:
    q, k, v, _ = _tensors(1)
    found = find_attention("exact-decode")(q, k, v, enable_gqa=True, **options)
    expected = find_attention("exact")(q, k, v, enable_gqa=True, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("option", ["plain", "mask", "bias"])
def test_what_sees_later_tokens_is_not_decoded(option: str) -> None:
    with pytest.raises(ArgumentError, match="expected a call in which each token sees none after"):
        _call("exact-decode", **OPTIONS[option])


def test_exact_gives_float64s_bits_back_rounded_once() -> None:
    q, k, v, _ = (tensor.double() for tensor in _tensors())
    found = find_attention("exact")(q, k, v, is_causal=True)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert float((found - expected).abs().max()) < 1e-14


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flashy", "attention: expected one of ours"),
        ("explicit:p99", "format: expected"),
        ("kernel+none", "attention: expected one of"),
        ("nowhere:f", "attention: expected MODULE:NAME"),
        ("math:pi", "attention: expected math:pi to be a callable"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        find_attention(name)


def test_an_attention_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_kernels")
    module.attend = functional.scaled_dot_product_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_kernels", module)
    assert find_attention("my_kernels:attend") is functional.scaled_dot_product_attention


def test_dropout_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dropout_p: expected 0 .* got 0\.5"):
        _call("explicit", dropout_p=0.5)


def test_a_mask_and_causal_add_up() -> None:
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8)
    bias = Call(q, k, k, causal=True, mask=torch.full((1, 4), -2.0)).bias()
    assert bias is not None
    assert bias.tolist() == [[-2, -math.inf, -math.inf, -math.inf],
                             [-2, -2, -math.inf, -math.inf]]  # fmt: skip


def test_calls_are_replaced_under_any_name_and_left_alone_afterwards() -> None:
    from torch.nn.functional import scaled_dot_product_attention as imported

    q, k, v, _ = _tensors()
    seen = []

    def replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs)
        return functional.scaled_dot_product_attention(*args, **kwargs) * 0

    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad(), replaced_attention(replacement):
        assert not functional.scaled_dot_product_attention(q, k, v).any()
        assert not imported(q, k, v, is_causal=True).any()
        encoder(torch.randn(2, 5, 16))
    assert len(seen) == 3
    assert imported(q, k, v).any()
    assert functional.scaled_dot_product_attention is imported
