"""Biased rounding of P V where several keys share a row's maximum (arXiv 2510.04212).

P = exp(S - m) is exactly 1 at the maximum. Where two keys share it and V has one sign, the sum of
their values needs one bit more than the format has: in half of all cases it lies midway between two
numbers. The small terms of the other keys have the same sign, so they push every such tie the same
way: away from zero. Errors of one sign add up over a training, where errors of both signs cancel.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from .formats import parse_format

_ROWS, _KEYS, _HEAD_DIM = 64, 64, 64
_GAP = 12.0  # logits below the maximum: the other keys' terms are smaller than a gap of the format
SHIFT = 1.5  # by how much the maximum is moved where it is moved


def measure_bias(
    format_name: str, values: str, ties: int, shifted: bool, seeds: int
) -> dict[str, dict[str, list[float]]]:
    """Measures the signed error of rounding P V, summed in float32, to the format.

    Args:
        format_name: the format that P and P V are rounded to.
        values: "one_sign": V = -|N(0, 1)| - 0.5; "two_signs": N(0, 1).
        ties: keys that share the maximum of a row.
        shifted: whether m is moved up so that P is below 1 everywhere.
        seeds: how many draws of 64 rows, 64 keys and 64 columns.

    Returns:
        {"product": ..., "output": ...}, each {"bias": ..., "away": ..., "stderr": ...} with one
        number per seed: the mean signed error in gaps of the format, that error counted as
        positive where it leads away from zero, and the standard error of the mean of the latter.
        "product" rounds P V and leaves the division by l for later; "output" divides first and
        rounds once, as the kernels do.

    Raises:
        ArgumentError: unknown values, or more ties than keys.
    """
    if values not in ("one_sign", "two_signs"):
        raise ArgumentError(f"inputs: expected one_sign or two_signs, got {values!r}")
    if not 1 <= ties < _KEYS:
        raise ArgumentError(f"ties: expected 1 to {_KEYS - 1}, got {ties}")
    number_format = parse_format(format_name)
    rounded: dict[str, dict[str, list[float]]] = {
        place: {"bias": [], "away": [], "stderr": []} for place in ("product", "output")
    }
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        scores = -_GAP - torch.rand((_ROWS, _KEYS), generator=generator)
        # Which keys tie differs by row, as does V by column: independent sums.
        order = torch.rand((_ROWS, _KEYS), generator=generator).argsort(-1)
        scores.scatter_(-1, order[:, :ties], 0.0)
        v = torch.randn((_KEYS, _HEAD_DIM), generator=generator)
        v = v if values == "two_signs" else -v.abs() - 0.5
        v = parse_format(format_name.partition(":")[0]).round(v)
        probs = (scores - (SHIFT if shifted else 0.0)).exp()
        product = number_format.round(probs, generator).double() @ v.double()
        for place, exact in (
            ("product", product),
            ("output", product / probs.double().sum(-1, keepdim=True)),
        ):
            error = number_format.round(exact.float(), generator).double() - exact
            error = error / number_format.ulp(exact)
            away = error * exact.sign()
            rounded[place]["bias"].append(float(error.mean()))
            rounded[place]["away"].append(float(away.mean()))
            rounded[place]["stderr"].append(float(away.std() / away.numel() ** 0.5))
    return rounded
