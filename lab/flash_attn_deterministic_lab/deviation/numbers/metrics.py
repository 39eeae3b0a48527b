"""How far one tensor is from another: definitions in one place."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from ...errors import ArgumentError
from .formats import NumberFormat

Metrics = dict[str, list[float]]


def deviation(actual: torch.Tensor, golden: torch.Tensor, number_format: NumberFormat) -> Metrics:
    """Measures the difference d = actual - golden in float64.

    Args:
        actual: (seeds, ...).
        golden: like actual; finite.
        number_format: the format whose gaps are units in the last place, ulp. A row (the last
            dimension) has the gap at its largest |golden|: its sums resolve no smaller one.

    Returns:
        For each metric one number per seed: max |d|; mean |d|; std of d; rmse, the root of mean
        d^2; relative, |d|_2 / |golden|_2; max_relative, max |d| / max |golden|; ulp_max and
        ulp_mean of |d|; bias, mean d. All in units of the values, but for relative and ulp ones.

    Raises:
        ArgumentError: shapes differ.
    """
    if actual.shape != golden.shape:
        raise ArgumentError(
            f"actual: expected the shape of golden, {tuple(golden.shape)}, got "
            f"{tuple(actual.shape)}"
        )
    gaps = number_format.ulp(golden.double().abs().amax(-1, keepdim=True)).expand(golden.shape)
    golden = golden.double().flatten(1)
    difference = actual.double().flatten(1) - golden
    size = difference.abs()
    squares = difference.square()
    ulps = size / gaps.flatten(1)
    # A golden row of zeros has no relative deviation: 0 / 0 counts as 0.
    tiny = torch.finfo(torch.float64).tiny
    values = {
        "max": size.amax(1),
        "mean": size.mean(1),
        "std": difference.std(1, correction=0),
        "rmse": squares.mean(1).sqrt(),
        "relative": squares.sum(1).sqrt() / golden.square().sum(1).sqrt().clamp(min=tiny),
        "max_relative": size.amax(1) / golden.abs().amax(1).clamp(min=tiny),
        "ulp_max": ulps.amax(1),
        "ulp_mean": ulps.mean(1),
        "bias": difference.mean(1),
    }
    return {name: found.tolist() for name, found in values.items()}


def distances(mine: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> dict[str, float]:
    """Measures how far weight matrices are from others of the same shapes, one by one.

    Returns:
        "max_difference", "wasserstein" and "l1" (of an element), means over the matrices; "l2":
        |w - w'| / |w'| of all together.
    """
    pairs = zip(mine, other, strict=True)
    sizes = [(left.double() - right.double()).abs() for left, right in pairs]
    squares = sum(float(size.square().sum()) for size in sizes)
    norm = sum(float(right.double().square().sum()) for right in other)
    return {
        "max_difference": statistics.fmean(float(size.max()) for size in sizes),
        "wasserstein": statistics.fmean(map(wasserstein, mine, other)),
        "l1": statistics.fmean(float(size.mean()) for size in sizes),
        "l2": math.sqrt(squares / max(norm, 1e-300)),
    }


def wasserstein(left: torch.Tensor, right: torch.Tensor) -> float:
    """Returns the 1-Wasserstein distance of two equally large samples, in units of the values.

    For samples of one size it is the mean distance of sorted values (as scipy's
    `wasserstein_distance` computes).
    """
    first, second = (tensor.flatten().sort().values.double() for tensor in (left, right))
    return float((first - second).abs().mean())
