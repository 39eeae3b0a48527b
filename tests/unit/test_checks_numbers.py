"""Arguments that are plain numbers and flags."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from calls import CALLS, kvcache_call, varlen_call
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    FlashAttnError,
)

GOOD = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("softmax_scale", [math.nan, math.inf, -math.inf, 0, 0.0, -1.5])
def test_softmax_scale_is_positive_and_finite(softmax_scale: float) -> None:
    with pytest.raises(
        ArgumentError,
        match=f"softmax_scale: expected a positive, finite number, got {softmax_scale}",
    ):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale)


@pytest.mark.parametrize("softmax_scale", [torch.tensor(1.0), "1"], ids=["tensor", "str"])
def test_softmax_scale_is_a_number(softmax_scale: object) -> None:
    with pytest.raises(ArgumentTypeError, match="softmax_scale: expected a float or None, got"):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale)  # type: ignore[call-overload]


@pytest.mark.parametrize("softmax_scale", [1e-30, 0.125, 3])
def test_positive_scales_are_accepted(softmax_scale: float) -> None:
    assert flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale).shape == GOOD.shape


def test_causal_is_a_flag() -> None:
    with pytest.raises(ArgumentTypeError, match="causal: expected a bool, got float"):
        flash_attn_func(GOOD, GOOD, GOOD, causal=0.125)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param(
            {"window_size": 5}, ArgumentTypeError, r"window_size: expected a tuple", id="window-int"
        ),
        pytest.param(
            {"window_size": (1, 2, 3)}, ArgumentTypeError, r"got \(1, 2, 3\)", id="window-three"
        ),
        pytest.param(
            {"window_size": (1.0, 2)},
            ArgumentTypeError,
            "window_size: .* got a float",
            id="window-float",
        ),
        pytest.param(
            {"softcap": -1.0}, ArgumentError, r"softcap: .* got -1\.0", id="softcap-negative"
        ),
        pytest.param({"softcap": math.nan}, ArgumentError, "softcap: .* got nan", id="softcap-nan"),
        pytest.param({"softcap": math.inf}, ArgumentError, "softcap: .* got inf", id="softcap-inf"),
        pytest.param({"softcap": "1"}, ArgumentTypeError, "softcap: .* got str", id="softcap-str"),
        pytest.param(
            {"split_size": 100},
            ArgumentError,
            "split_size: .* nearest valid: 64 and 128",
            id="split",
        ),
        pytest.param(
            {"split_size": -64}, ArgumentError, "split_size: .* got -64", id="split-negative"
        ),
        pytest.param(
            {"split_size": 64.0}, ArgumentTypeError, "split_size: .* got float", id="split-float"
        ),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_number(
    name: str, arguments: dict[str, Any], error: type[FlashAttnError], message: str
) -> None:
    with pytest.raises(error, match=message):
        CALLS[name](32)(**arguments)


DROPOUT = [name for name in CALLS if name != "flash_attn_with_kvcache"]


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_a_number(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match="dropout_p: expected a float, got str"):
        CALLS[name](32)(dropout_p="0.1")


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 2, math.nan])
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_a_probability(name: str, dropout_p: float) -> None:
    with pytest.raises(ArgumentError, match=r"dropout_p: expected a probability in \[0, 1\), got"):
        CALLS[name](32)(dropout_p=dropout_p)


@pytest.mark.parametrize("name", DROPOUT)
def test_flags_of_the_backward(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match="deterministic: expected a bool or None, got int"):
        CALLS[name](32)(deterministic=1)
    with pytest.raises(ArgumentTypeError, match="return_attn_probs: expected a bool, got str"):
        CALLS[name](32)(return_attn_probs="yes")


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_is_an_int(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{name}: expected an int, got Tensor"):
        varlen_call()(**{name: torch.tensor(9)})
    with pytest.raises(ArgumentError, match=f"{name}: expected 0 or more tokens, got -1"):
        varlen_call()(**{name: -1})


def test_num_splits_is_an_int() -> None:
    with pytest.raises(ArgumentTypeError, match="num_splits: expected an int, got float"):
        kvcache_call()(num_splits=1.0)
    with pytest.raises(ArgumentError, match=r"num_splits: expected 0 .* got -1"):
        kvcache_call()(num_splits=-1)


def test_flags_of_the_cache() -> None:
    with pytest.raises(ArgumentTypeError, match="rotary_interleaved: expected a bool, got str"):
        kvcache_call()(rotary_interleaved="yes")
