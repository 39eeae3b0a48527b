"""Arguments that are numbers or flags."""

from __future__ import annotations

import functools
import math
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from bits import all_equal, bits_equal
from calls import CALLS, int32, varlen_call
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.errors import ArgumentTypeError

GOOD = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)
FLAGS = (
    "causal",
    "deterministic",
    "return_attn_probs",
    "return_max_logits",
    "return_softmax_lse",
    "rotary_interleaved",
)
REAL = {"softmax_scale": 0.25, "softcap": 4.0, "dropout_p": 0.5}


def whole_numbers(kind: Any) -> dict[str, Any]:
    """Arguments that are integers, of a type."""
    lengths = {"max_seqlen": 5, "max_seqlen_q": 5, "max_seqlen_k": 9}
    numbers = {n: kind(x) for n, x in {**lengths, "split_size": 64, "num_splits": 3}.items()}
    return {**numbers, "window_size": (kind(3), kind(0))}


@pytest.mark.parametrize("softmax_scale", [2.0**-126, 2.0**127], ids=["smallest", "largest"])
def test_scales_at_the_limits_keep_the_mask(softmax_scale: float) -> None:
    q = torch.full((1, 4, 1, 32), 0.25, dtype=torch.bfloat16)
    v = torch.arange(4.0).to(torch.bfloat16)[None, :, None, None].expand(1, 4, 1, 32)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": True}
    out = flash_attn_func(q * 0 if softmax_scale > 1 else q, q, v, **options)
    assert out[0, :, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.5]


# Of an argument, values and others that mean the same.
SAME: list[tuple[Any, Any]] = [
    *(({"softcap": value}, {}) for value in (0, -0.0, -0.5, -3, -math.inf)),
    ({"softcap": True}, {"softcap": 1.0}),
    ({"softmax_scale": True}, {"softmax_scale": 1.0}),
    ({"softmax_scale": 2}, {"softmax_scale": 2.0}),
    # As in flash_attn 2.8.3, which takes a negative side for no window.
    *((given, meant) for wide in (1000, 2**31, 2**63, 10**30) for given,
        meant in (({"causal": False, "window_size": (wide, wide)}, {"causal": False}),
        ({"causal": False, "window_size": (-wide, 0)}, {"causal": True}))),
    ({"causal": True, "window_size": (2, 7)}, {"causal": False, "window_size": (2, 0)}),
    *(({"window_size": window}, {"window_size": (3, 0)}) for window in ([3, 0],
        torch.tensor([3, 0]), torch.tensor([3, 0], dtype=torch.int32),
        np.array([3, 0]), torch.Size([3, 0]), range(3, -1, -3), UserList([3, 0]))),
    *((dict.fromkeys(FLAGS, yes), dict.fromkeys(FLAGS, True)) for yes in (1, 2, -1, np.bool_(True),
        torch.tensor(True), torch.tensor(2), np.array([True]))),
    *(({n: real(x) for n, x in REAL.items()} | whole_numbers(whole),
        REAL | whole_numbers(int)) for real, whole in ((np.float32, np.int32),
        (np.float64, np.int64), (torch.tensor, torch.tensor),
        (lambda x: torch.tensor([x]), lambda x: np.array(x)))),
    ({"num_splits": 1}, {}),
    ({"num_splits": 7}, {}),
    ({"cache_seqlens": 7}, {"cache_seqlens": int32(7, 7)}),
    ({"cache_seqlens": np.int32(9)}, {"cache_seqlens": int32(9, 9)}),
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("given", "meant"), SAME, ids=map(str, range(len(SAME))))
def test_values_that_mean_the_same(name: str, given: dict[str, Any], meant: Any) -> None:
    """The same bits; a function takes those of its own arguments."""
    results = []
    for values in (given, meant):
        call = CALLS[name](32)
        own = {n: x for n, x in values.items() if n in call.function.__annotations__}
        if "window_size" in {**given, **meant}:  # with one, rotary positions count
            own |= {n: None for n in call.arguments if n.startswith("rotary")}
        torch.manual_seed(0)
        found = call(**own)
        results.append(found[:2] if isinstance(found, tuple) else (found,))
    assert all_equal(*results)


@pytest.mark.parametrize("argument", ["softmax_scale", "softcap"])
def test_numpy_float_is_a_constant_of_a_graph(argument: str) -> None:
    torch._dynamo.reset()
    value: Any = {argument: np.float64(0.5)}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function = functools.partial(flash_attn_func, **value)
        compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
        out = compiled(GOOD, GOOD, GOOD)
    assert bits_equal(out, flash_attn_func(GOOD, GOOD, GOOD, **value))


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
