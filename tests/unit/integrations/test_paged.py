"""The attention of servers, beside our function with the same arguments."""

from __future__ import annotations

from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic.integrations.paged import PagedAttention
from flash_attn_deterministic.types import Lengths

varlen_func: Any = package.flash_attn_varlen_func


@pytest.mark.parametrize("given", [False, True], ids=["returned", "output"])
@pytest.mark.parametrize(("dtype", "scales"), [
    pytest.param(torch.bfloat16, (), id="16-bits"),
    pytest.param(torch.float8_e4m3fn, (), id="8-bits"),
    # A power of two rounds no query, so that k_descale has the same bits in both.
    pytest.param(torch.float8_e4m3fn, (0.25, 0.0137), id="8-bits-scales"),
])  # fmt: skip
def test_bits_are_those_of_the_function(
    dtype: torch.dtype, scales: tuple[float, ...], given: bool
) -> None:
    q = normal(7, 4, 32)
    keys, values = (normal(5, 16, 2, 32, seed=seed).to(dtype) for seed in (1, 2))
    starts, table = (int32(0, 1, 7), int32(0, 40, 55)), int32(4, 0, 2, 1, 1, 1).view(2, 3)
    lengths = Lengths(*starts, 6, 40, block_table=table)
    output = torch.empty(7, 4 * 32, dtype=q.dtype) if given else None
    attention = PagedAttention(0.3, (20, 0), 5.0, None, *scales)
    with package.deterministic_mode(False):
        found = attention(q, (keys, values), lengths, True, output=output)
    assert output is None or found is output
    expected = varlen_func(
        q,
        keys,
        values,
        *starts,
        6,
        40,
        softmax_scale=0.3,
        causal=True,
        window_size=(20, 0),
        softcap=5.0,
        block_table=table,
        **dict(zip(("k_descale", "v_descale"), scales, strict=False)),
    )
    assert bits_equal(found.view_as(expected), expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_a_scale_that_is_none_is_named(name: str, scale: float) -> None:
    with pytest.raises(package.ArgumentError, match=f"{name}: expected a positive"):
        PagedAttention(
            0.3,
            k_descale=scale if name == "k_descale" else 1.0,
            v_descale=scale if name == "v_descale" else 1.0,
        )
