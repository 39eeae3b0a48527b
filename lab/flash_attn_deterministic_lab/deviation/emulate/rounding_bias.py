"""Biased rounding of P V (Qiu and Yao, arXiv 2510.04212), on rows made for it.

P = exp(S - m) is exactly 1 at the maximum. Where two keys share it and V has one sign, the sum of
their values needs one bit more than the format has: in half of all cases it lies midway between two
numbers. The small terms of the other keys have the same sign, so they push every such tie the same
way: away from zero. Where one key alone has the maximum, the product starts from a number of the
format, and small terms of one sign are lost each time: a smaller error towards zero.
"""

from __future__ import annotations

import torch

from ..numbers.formats import parse_format
from .gradients import kept_output

_ROWS, _KEYS, _HEAD_DIM = 64, 64, 64
_GAP = 12.0  # logits below the maximum: the other keys' terms are smaller than a gap of the format
SHIFT = 1.5  # by how much the maximum is moved where it is moved
Means = dict[str, dict[str, list[float]]]


def measure_bias(format_name: str, values: str, ties: int, shifted: bool, seeds: int) -> Means:
    """Measures the signed error of rounding P V, summed in float32, to the format.

    V is -|N(0, 1)| - 0.5 ("one_sign") or N(0, 1) ("two_signs"); so many keys share the maximum of
    a row (`ties`), which may be `shifted` up so that P is below 1 everywhere.

    Returns:
        For each place {"away": one mean per seed}. Errors are in gaps of the format and count
        as positive away from zero. "product" rounds P V of the rounded P and leaves the division by
        l for later; "output" divides first and rounds once, as the kernels do, and is compared with
        exact attention; "residual" adds to that what rounding took, rounded.
    """
    number_format = parse_format(format_name)
    plain = parse_format(format_name.partition(":")[0])
    found: Means = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        scores = -_GAP - torch.rand((_ROWS, _KEYS), generator=generator)
        # Which keys tie differs by row, as does V by column: independent sums.
        order = torch.rand((_ROWS, _KEYS), generator=generator).argsort(-1)
        scores.scatter_(-1, order[:, :ties], 0.0)
        v = torch.randn((_KEYS, _HEAD_DIM), generator=generator)
        v = plain.round(v if values == "two_signs" else -v.abs() - 0.5)
        probs = (scores - (SHIFT if shifted else 0.0)).exp()
        product = number_format.round(probs, generator).double() @ v.double()
        # l is the sum of the weights before they are rounded, in float32, as the kernels have it.
        total = probs.sum(-1, keepdim=True).double()
        output = product / total
        exact = probs.double() @ v.double() / total
        kept = {
            "product": (number_format.round(product.float(), generator).double(), product),
            "output": (number_format.round(output.float(), generator).double(), exact),
            "residual": (kept_output(output, plain, "residual"), exact),
        }
        for place, (rounded, true) in kept.items():
            error = (rounded - true) / number_format.ulp(true) * true.sign()
            found.setdefault(place, {"away": []})["away"].append(float(error.mean()))
    return found
