"""Bootstrap intervals: how far a number would move with other draws, seeds or batches."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A number, and the bounds of its 95 % interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        low, middle, high = map(short, (self.low, self.middle, self.high))
        return middle if low == middle == high else f"{middle} [{low}, {high}]"

    def listed(self) -> list[float]:
        """Returns the three numbers as results have them."""
        return [self.low, self.middle, self.high]

    def lies_in(self, low: float, high: float) -> bool | None:
        """Returns whether the whole interval is in [low, high]; None where only a part of it is."""
        if math.isnan(self.middle):
            return None
        if low <= self.low and self.high <= high:
            return True
        return False if self.high < low or self.low > high else None


def short(value: float) -> str:
    """Two significant digits, without an exponent for hundreds and thousands."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}"


def finite(values: Iterable[float | None]) -> list[float]:
    """Returns the values that are there: JSON has null where a result was infinite or NaN."""
    return [value for value in values if value is not None]


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median; None where a value is missing, which is then the study's result."""
    listed = list(values)
    there = finite(listed)
    return statistics.median(there) if there and len(there) == len(listed) else None


@functools.lru_cache
def resamples(count: int) -> torch.Tensor:
    """Returns indices (1 + RESAMPLES, count) of items: all of them, then draws of as many."""
    # From a fixed seed: a report says the same each time.
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.arange(count)[None], drawn])


def bounds(values: torch.Tensor) -> torch.Tensor:
    """Returns (..., 3), low, middle and high, of a statistic of `resamples`, (..., 1 + RESAMPLES).

    A resample of one item again and again may have no such statistic: NaN.
    """
    whole, drawn = values[..., 0].double(), values[..., 1:].double()
    low, high = drawn.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=-1)
    return torch.stack([low.fmin(whole), whole, high.fmax(whole)], -1)


def bootstrap(count: int, statistic: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
    """Returns a statistic of independent items with its bootstrap interval.

    Args:
        count: how many items.
        statistic: maps indices of items (resamples, count) to values (resamples,).
    """
    return Interval(*bounds(statistic(resamples(count))).tolist())


def median_interval(values: Sequence[float | None]) -> Interval:
    """Returns the median of independent draws with its bootstrap interval; NaN where one misses."""
    return _of_values(values, lambda drawn: drawn.quantile(0.5, dim=-1))


def mean_interval(values: Sequence[float | None]) -> Interval:
    """Returns the mean of independent draws with its bootstrap interval; NaN where one misses."""
    return _of_values(values, lambda drawn: drawn.mean(-1))


def _of_values(
    values: Sequence[float | None], statistic: Callable[[torch.Tensor], torch.Tensor]
) -> Interval:
    there = finite(values)
    if not there or len(there) < len(values):
        return Interval(math.nan, math.nan, math.nan)
    data = torch.tensor(there, dtype=torch.float64)
    return bootstrap(len(there), lambda index: statistic(data[index]))
