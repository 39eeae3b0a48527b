from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from flash_attn_deterministic_lab.deviation.numbers.intervals import (
    Interval,
    bootstrap,
    mean_interval,
    median_interval,
)


def _root_mean_square(values: list[float]) -> Interval:
    data = torch.tensor(values)
    return bootstrap(len(data), lambda index: data[index].square().mean(-1).sqrt())


@pytest.mark.parametrize(
    ("count", "interval", "true", "least"),
    [
        pytest.param(5, mean_interval, 0.0, 92, id="mean-5"),
        pytest.param(40, mean_interval, 0.0, 92, id="mean-40"),
        pytest.param(5, median_interval, 0.0, 88, id="median-5"),
        pytest.param(8, median_interval, 0.0, 88, id="median-8"),
        pytest.param(8, _root_mean_square, 1.0, 85, id="bootstrap-8"),
        pytest.param(24, _root_mean_square, 1.0, 87, id="bootstrap-24"),
    ],
)
def test_an_interval_covers_a_number_about_as_often_as_it_says(
    count: int, interval: Callable[[list[float]], Interval], true: float, least: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    trials, hits = 200, 0
    for _ in range(trials):
        found = interval(torch.randn(count, generator=generator).tolist())
        assert found.low <= found.middle <= found.high
        hits += found.low <= true <= found.high
    assert least <= 100 * hits / trials <= 98.5


@pytest.mark.parametrize("interval", [mean_interval, median_interval, _root_mean_square])
def test_two_draws_have_no_interval_and_decide_nothing(
    interval: Callable[[list[float]], Interval],
) -> None:
    found = interval([1.0, 1.0])
    assert (found.middle, str(found)) == (1, "1")
    assert math.isnan(found.low)
    assert found.lies_in(0, 2) is None
    assert str(Interval.read([None, 1.0, None])) == "1"


def test_equal_values_have_no_width() -> None:
    assert median_interval([2.0] * 5) == Interval(2, 2, 2)
    assert str(median_interval([2.0] * 5)) == "2"


@pytest.mark.parametrize("values", [[], [1.0, None]], ids=["none", "one-missing"])
def test_what_misses_is_not_a_number(values: list[float | None]) -> None:
    assert math.isnan(median_interval(values).middle)
    assert math.isnan(mean_interval(values).middle)
    assert str(median_interval(values)) == "nan"
