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
from calls import CALLS, DIFFERENTIABLE, kvcache_call, varlen_call
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.errors import ArgumentError, ArgumentTypeError

GOOD = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("softmax_scale", "softcap"),
    [
        pytest.param(0.125, 1e-50, id="cap"),
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


@pytest.mark.parametrize("softmax_scale", [1e-30, 0.125, 3])
def test_positive_scales_are_accepted(softmax_scale: float) -> None:
    assert flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale).shape == GOOD.shape


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


def test_any_negative_number_is_no_limit() -> None:
    """As in flash_attn 2.8.3, which takes a negative side for no window."""
    call = CALLS["flash_attn_func"](32)
    assert bits_equal(call(window_size=(-5, 0)), call(window_size=(-1, 0)))


@pytest.mark.parametrize(
    "window",
    [torch.tensor(3), torch.tensor([[3, 0]]), torch.zeros(2), torch.ones(100, 100), {0: 3, 1: 0}],
    ids=["tensor", "matrix", "floats", "large", "dict"],
)
def test_wrong_windows(window: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="window_size: expected a pair") as caught:
        flash_attn_func(GOOD, GOOD, GOOD, window_size=window)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"left": torch.ones(3)}, "{'left': a tensor of dtype torch.float32 and shape (3,)}"),
        (np.ones(3), "an array of dtype float64 and shape (3,)"),
        ((torch.ones(1), 0), "(a tensor of dtype torch.float32 and shape (1,), 0)"),
        ((1.5, 0), "(1.5, 0)"),
    ],
    ids=["tensor-in-dict", "array", "tensor-in-pair", "float"],
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


def test_type_names_have_their_module_unless_built_in() -> None:
    with pytest.raises(ArgumentTypeError, match=r"causal: expected a bool, got numpy\.float32$"):
        flash_attn_func(GOOD, GOOD, GOOD, causal=np.float32(1))
