from __future__ import annotations

import math
from typing import Any

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from flash_attn_deterministic_lab.deviation.numbers.formats import parse_format
from flash_attn_deterministic_lab.errors import ArgumentError


def _spread(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over many binades, ties between numbers of short formats, and special values."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(20000, generator=generator, dtype=torch.float64)
    scaled = plain * torch.exp2(torch.randint(-40, 20, (20000,), generator=generator).double())
    ties = torch.arange(-4096, 4096, dtype=torch.float64) / 16
    tiny = torch.arange(-300, 300, dtype=torch.float64) * 2.0**-18
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 448, 464, 465, 57344, 61440])
    values = torch.cat([scaled, ties, ties * 64, tiny, tiny * 2.0**-130, special.double()])
    return values.to(dtype)


def _same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    numbers = ~np.isnan(right)
    signs = np.signbit(left[numbers]) == np.signbit(right[numbers])
    return np.array_equal(left, right, equal_nan=True) and bool(signs.all())


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
    ],
    ids=lambda value: str(value),
)
def test_rounds_as_ml_dtypes(name: str, oracle: str) -> None:
    values = _spread()
    dtype = np.float16 if oracle == "float16" else getattr(ml_dtypes, oracle)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.numpy().astype(dtype).astype(np.float32)
    assert _same(parse_format(name).round(values).numpy(), expected)


@pytest.mark.parametrize("bits", [2, 3, 5, 8, 13, 20, 23, 24])
def test_significands_of_any_length_as_gfloat(bits: int) -> None:
    info = gfloat.FormatInfo(
        name=f"p{bits}", k=8 + bits, precision=bits, bias=127, has_nz=True,
        domain=gfloat.Domain.Extended, num_high_nans=2 ** (bits - 1) - 1, has_subnormals=True,
        is_signed=True, is_twos_complement=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(bits)
    values = torch.randn(300, generator=generator) * torch.exp2(
        torch.randint(-140, 100, (300,), generator=generator).float()
    )
    values = values[values.abs() > 1e-36]
    rounded = parse_format(f"p{bits}").round(values)
    expected = [gfloat.round_float(info, float(value)) for value in values]
    assert rounded.double().tolist() == expected


@pytest.mark.parametrize("bits", [25, 40, 52, 53])
def test_significands_longer_than_float32s(bits: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = parse_format(f"p{bits}").round(values)
    ulp = torch.exp2(torch.floor(torch.log2(values.abs())) - bits + 1)
    assert torch.equal(rounded, (values / ulp).round() * ulp)


@pytest.mark.parametrize(
    ("name", "value", "gap"),
    [
        ("bf16", 1.0, 2.0**-7),
        ("bf16", 1.99, 2.0**-7),
        ("bf16", 2.0, 2.0**-6),
        ("fp16", 1e-7, 2.0**-24),
        ("fp16", 0.0, 2.0**-24),
        ("fp8_e4m3", 448.0, 32.0),
        ("fp32", -3.0, 2.0**-22),
        ("fp64", 1.0, 2.0**-52),
        ("fp64", 2.0**-200, 2.0**-252),
    ],
)
def test_ulp(name: str, value: float, gap: float) -> None:
    assert float(parse_format(name).ulp(torch.tensor([value], dtype=torch.float64))) == gap


@pytest.mark.parametrize("name", ["", "fp12", "p1", "p54", "p", "bf16:sr", "BF16", "p08"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="format: expected one of"):
        parse_format(name)


def test_a_container_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(ArgumentError, match="float64 or wider for p30"):
        parse_format("p30").round(torch.ones(2))


@pytest.mark.parametrize(("name", "bits"), [("bf16", 8), ("fp16", 11)])
def test_float64_is_rounded_once(name: str, bits: int) -> None:
    """By way of float32 the first value would become a tie, and go down to the even neighbour."""
    gap = 2.0 ** (1 - bits)
    values = torch.tensor([1 + gap / 2 + 2.0**-40, 1 + gap / 2, 1e300], dtype=torch.float64)
    assert parse_format(name).round(values).tolist() == [1 + gap, 1.0, math.inf]
    assert values[:1].to(torch.bfloat16 if name == "bf16" else torch.float16).double() == 1.0
