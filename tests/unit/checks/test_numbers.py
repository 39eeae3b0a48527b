"""Arguments that are numbers or flags."""

from __future__ import annotations

import functools
import math
import re
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from bits import bits_equal
from calls import CALLS, kvcache_call, varlen_call
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.checks.describe import shown
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    FlashAttnError,
)

DIFFERENTIABLE = [name for name in CALLS if name != "flash_attn_with_kvcache"]
GOOD = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)


# In the kernels' float32 these would be 0, subnormal, or infinite after the factor log2(e).
TOO_SMALL, TOO_LARGE = 2.0**-126 * (1 - 2.0**-50), 2.0**127 * (1 + 2.0**-50)


@pytest.mark.parametrize(
    "softmax_scale",
    [math.nan, math.inf, -math.inf, 0, 0.0, -1.5, 1e-60, TOO_SMALL, TOO_LARGE, 1e300, 10**400],
    ids=lambda scale: f"{scale}"[:20],
)
def test_softmax_scale_is_positive_and_finite(softmax_scale: float) -> None:
    got = re.escape(shown(softmax_scale))
    message = rf"softmax_scale: expected a positive, .* 2\*\*127 .* got {got};"
    with pytest.raises(ArgumentError, match=message):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale)


@pytest.mark.parametrize(
    ("softmax_scale", "softcap"),
    [
        pytest.param(0.125, 1e-50, id="cap-zero"),
        pytest.param(0.125, TOO_SMALL, id="cap-subnormal"),
        pytest.param(1.0, 1e40, id="cap-infinite"),
        pytest.param(2.0**-100, 2.0**30, id="ratio-subnormal"),
        pytest.param(2.0**100, 2.0**-30, id="ratio-infinite"),
    ],
)
def test_softcap_and_its_ratio_are_numbers_of_float32(softmax_scale: float, softcap: float) -> None:
    with pytest.raises(ArgumentError, match=r"softcap: expected .*2\*\*-126 to 2\*\*127"):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale, softcap=softcap)


@pytest.mark.parametrize("softcap", [0, 0.0, -0.0])
def test_no_softcap(softcap: float) -> None:
    out = flash_attn_func(GOOD + 1, GOOD + 1, GOOD + 1, softcap=softcap)
    assert bits_equal(out, flash_attn_func(GOOD + 1, GOOD + 1, GOOD + 1))


@pytest.mark.parametrize("softmax_scale", [2.0**-126, 2.0**127], ids=["smallest", "largest"])
def test_scales_at_the_limits_keep_the_mask(softmax_scale: float) -> None:
    q = torch.full((1, 4, 1, 32), 0.25, dtype=torch.bfloat16)
    v = torch.arange(4.0).to(torch.bfloat16)[None, :, None, None].expand(1, 4, 1, 32)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": True}
    out = flash_attn_func(q * 0 if softmax_scale > 1 else q, q, v, **options)
    assert out[0, :, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("name", CALLS)
def test_window_beyond_what_an_int_holds(name: str) -> None:
    rotary = {"rotary_cos": None, "rotary_sin": None} if "kvcache" in name else {}

    def call(left: int, right: int) -> torch.Tensor:
        out: torch.Tensor = CALLS[name](32)(causal=False, window_size=(left, right), **rotary)
        return out

    for wide in (2**31, 2**63, 10**30):
        assert bits_equal(call(wide, wide), call(-1, -1))
        assert bits_equal(call(-wide, 0), call(-1, 0))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_fits_into_an_int(name: str) -> None:
    assert bits_equal(varlen_call()(**{name: 2**30 - 1}), varlen_call()())
    for longest in (2**30, 2**63):
        with pytest.raises(ArgumentError, match=f"{name}: expected 0 to 1073741823 .* {longest}"):
            varlen_call()(**{name: longest})


@pytest.mark.parametrize(
    "softmax_scale", [torch.ones(2), "1", 1j], ids=["tensor", "str", "complex"]
)
def test_softmax_scale_is_a_number(softmax_scale: object) -> None:
    with pytest.raises(ArgumentTypeError, match="softmax_scale: expected a float or None, got"):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale)  # type: ignore[call-overload]


@pytest.mark.parametrize("softmax_scale", [1e-30, 0.125, 3])
def test_positive_scales_are_accepted(softmax_scale: float) -> None:
    assert flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale).shape == GOOD.shape


@pytest.mark.parametrize("value", [0.125, 1.0, "yes", None, torch.tensor(0.125)], ids=repr)
def test_all_flags_follow_one_rule(value: Any) -> None:
    """All flags accept a bool or an integer."""
    with pytest.raises(ArgumentTypeError, match=r"causal: expected a bool, got"):
        flash_attn_func(GOOD, GOOD, GOOD, causal=value)
    if value is not None:
        with pytest.raises(ArgumentTypeError, match=r"deterministic: expected a bool.*, got"):
            flash_attn_func(GOOD, GOOD, GOOD, deterministic=value)


@pytest.mark.parametrize(
    "yes",
    [True, 1, 2, -1, np.bool_(True), torch.tensor(True), torch.tensor(2), np.array([True])],
    ids=["bool", "1", "2", "-1", "numpy", "tensor", "int-tensor", "array"],
)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_types_of_flags(name: str, yes: Any) -> None:
    call = CALLS[name](32)
    out, lse, _ = call(causal=yes, deterministic=yes, return_attn_probs=yes)
    expected = call(causal=True, return_attn_probs=True)
    assert bits_equal(out, expected[0])
    assert bits_equal(lse, expected[1])


@pytest.mark.parametrize("argument", ["softcap", "softmax_scale"])
def test_a_bool_is_0_or_1_as_a_number(argument: str) -> None:
    as_bool: Any = {argument: True}
    as_number: Any = {argument: 1.0}
    out = flash_attn_func(GOOD, GOOD, GOOD, **as_bool)
    assert bits_equal(out, flash_attn_func(GOOD, GOOD, GOOD, **as_number))


NUMBERS: list[Any] = [
    pytest.param(np.float32, np.int32, id="numpy"),
    pytest.param(np.float64, np.int64, id="numpy-64"),
    pytest.param(torch.tensor, torch.tensor, id="tensor"),
    pytest.param(lambda x: torch.tensor([x]), lambda x: np.array(x), id="one-element"),
]


@pytest.mark.parametrize(("real", "whole"), NUMBERS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_types_of_numbers(name: str, real: Any, whole: Any) -> None:
    call = CALLS[name](32)
    options = {"softmax_scale": 0.25, "softcap": 4.0, "dropout_p": 0.5}
    lengths = {n: x for n, x in call.arguments.items() if n.startswith("max_seqlen")}
    torch.manual_seed(0)
    expected = call(**options, window_size=(3, 0), split_size=64)
    torch.manual_seed(0)
    out = call(
        **{n: real(x) for n, x in options.items()},
        **{n: whole(x) for n, x in lengths.items()},
        window_size=(whole(3), whole(0)),
        split_size=whole(64),
    )
    assert bits_equal(out, expected)


@pytest.mark.parametrize(("real", "whole"), NUMBERS)
def test_types_of_numbers_of_the_cache(real: Any, whole: Any) -> None:
    expected = kvcache_call()(cache_seqlens=9, softmax_scale=0.25, softcap=4.0, num_splits=3)
    length = np.int32(9)  # a tensor is one length for each sequence
    options = {"softmax_scale": real(0.25), "softcap": real(4.0), "num_splits": whole(3)}
    flags = {"rotary_interleaved": whole(1), "causal": whole(1)}
    assert bits_equal(kvcache_call()(cache_seqlens=length, **options, **flags), expected)


@pytest.mark.parametrize(
    "window",
    [
        [3, 0],
        torch.tensor([3, 0]),
        torch.tensor([3, 0], dtype=torch.int32),
        np.array([3, 0]),
        torch.Size([3, 0]),
        range(3, -1, -3),
        UserList([3, 0]),
    ],
    ids=["list", "tensor", "tensor-32", "array", "size", "range", "sequence"],
)
@pytest.mark.parametrize("name", CALLS)
def test_types_of_windows(name: str, window: Any) -> None:
    assert bits_equal(CALLS[name](32)(window_size=window), CALLS[name](32)(window_size=(3, 0)))


@pytest.mark.parametrize(
    "window",
    [
        5, None, (3,), (1, 2, 3), torch.tensor(3), torch.tensor([[3, 0]]), torch.zeros(2), "30",
        {0: 3, 1: 0}, {3, 0}, (1.0, 0), (None, 0), torch.ones(100, 100),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_windows(window: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="window_size: expected a pair") as caught:
        flash_attn_func(GOOD, GOOD, GOOD, window_size=window)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"left": torch.ones(3)}, "{'left': a tensor of dtype torch.float32 and shape (3,)}"),
        ([np.ones(3)], "[an array of dtype float64 and shape (3,)]"),
        (np.ones(3), "an array of dtype float64 and shape (3,)"),
        ({1: 10**5000}, "{1: an int of 16610 bits}"),
    ],
    ids=["tensor-in-dict", "array-in-list", "array", "int-in-dict"],
)
def test_messages_show_no_values_of_tensors_and_arrays(window: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"got {re.escape(message)}$"):
        flash_attn_func(GOOD, GOOD, GOOD, window_size=window)


@pytest.mark.parametrize("argument", ["softmax_scale", "softcap"])
def test_numpy_float_is_a_constant_of_a_graph(argument: str) -> None:
    torch._dynamo.reset()
    value: Any = {argument: np.float64(0.5)}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function = functools.partial(flash_attn_func, **value)
        compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
        out = compiled(GOOD, GOOD, GOOD)
    assert bits_equal(out, flash_attn_func(GOOD, GOOD, GOOD, **value))


@pytest.mark.parametrize("softcap", [-1.0, -0.5, -math.inf, -3])
@pytest.mark.parametrize("name", CALLS)
def test_negative_softcap_is_none(name: str, softcap: float) -> None:
    assert bits_equal(CALLS[name](32)(softcap=softcap), CALLS[name](32)())


@pytest.mark.parametrize("size", [5000, 20000])
@pytest.mark.parametrize(
    "argument", ["softmax_scale", "softcap", "split_size", "dropout_p", "window_size"]
)
def test_numbers_too_long_to_print(argument: str, size: int) -> None:
    value: Any = 10**size
    if argument == "window_size":  # no limit
        assert bits_equal(
            flash_attn_func(GOOD, GOOD, GOOD, window_size=(value, -value)),
            flash_attn_func(GOOD, GOOD, GOOD),
        )
        return
    with pytest.raises(ArgumentError, match=f"{argument}: expected .* got an int of") as caught:
        flash_attn_func(GOOD, GOOD, GOOD, **{argument: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param(
            {"window_size": 5}, ArgumentTypeError, r"window_size: expected a pair", id="window-int"
        ),
        pytest.param(
            {"window_size": (1, 2, 3)}, ArgumentTypeError, r"got \(1, 2, 3\)", id="window-three"
        ),
        pytest.param(
            {"window_size": (1.0, 2)},
            ArgumentTypeError,
            "window_size: .* got float",
            id="window-float",
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
            {"split_size": 2**29 + 64},
            ArgumentError,
            r"split_size: expected .* up to 2\*\*29, .* got 536870976",
            id="split-too-large",
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


DROPOUT = DIFFERENTIABLE


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
    with pytest.raises(ArgumentTypeError, match="deterministic: expected a bool, got float"):
        CALLS[name](32)(deterministic=0.5)
    with pytest.raises(ArgumentTypeError, match="return_attn_probs: expected a bool, got str"):
        CALLS[name](32)(return_attn_probs="yes")


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_is_an_int(name: str) -> None:
    with pytest.raises(
        ArgumentTypeError, match=rf"{name}: expected an int, got a tensor of .*float32 and shape"
    ):
        varlen_call()(**{name: torch.tensor(9.0)})
    with pytest.raises(ArgumentTypeError, match=rf"{name}: .* a tensor of .* and shape \(2,\)$"):
        varlen_call()(**{name: torch.tensor([9, 9])})
    with pytest.raises(ArgumentTypeError, match=f"{name}: .* on the meta device"):
        varlen_call()(**{name: torch.tensor(9, device="meta")})
    with pytest.raises(ArgumentError, match=f"{name}: expected 0 to .* tokens, got -1"):
        varlen_call()(**{name: -1})


def test_num_splits_is_an_int() -> None:
    with pytest.raises(ArgumentTypeError, match="num_splits: expected an int, got float"):
        kvcache_call()(num_splits=1.0)
    with pytest.raises(ArgumentError, match=r"num_splits: expected 0 .* got -1"):
        kvcache_call()(num_splits=-1)


def test_flags_of_the_cache() -> None:
    for name in ("rotary_interleaved", "return_softmax_lse"):
        with pytest.raises(ArgumentTypeError, match=f"{name}: expected a bool, got str"):
            kvcache_call()(**{name: "yes"})


def test_type_names_have_their_module_unless_built_in() -> None:
    with pytest.raises(ArgumentTypeError, match=r"causal: expected a bool, got numpy\.float32$"):
        flash_attn_func(GOOD, GOOD, GOOD, causal=np.float32(1))
