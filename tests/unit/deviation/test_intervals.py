from __future__ import annotations

import math

import pytest
import torch
from flash_attn_deterministic.deviation.numbers.intervals import (
    Interval,
    mean_interval,
    median,
    median_interval,
)


def test_an_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(100):
        found = mean_interval(torch.randn(40, generator=generator).tolist())
        assert found.low <= found.middle <= found.high
        hits += found.low <= 0 <= found.high
    assert 88 <= hits <= 99


def test_equal_values_have_no_width() -> None:
    assert median_interval([2.0] * 5) == Interval(2, 2, 2)
    assert str(median_interval([2.0] * 5)) == "2"


@pytest.mark.parametrize("values", [[], [1.0, None]], ids=["none", "one-missing"])
def test_what_misses_is_not_a_number(values: list[float | None]) -> None:
    assert math.isnan(median_interval(values).middle)
    assert math.isnan(mean_interval(values).middle)
    assert median(values) is None


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        pytest.param(Interval(2, 3, 4), True, id="inside"),
        pytest.param(Interval(0, 3, 4), None, id="partly"),
        pytest.param(Interval(6, 7, 8), False, id="outside"),
        pytest.param(Interval(math.nan, math.nan, math.nan), None, id="nan"),
    ],
)
def test_two_sided(interval: Interval, expected: bool | None) -> None:
    assert interval.lies_in(1, 5) is expected
