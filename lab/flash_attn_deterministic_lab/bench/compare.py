"""Checks that two implementations compute the same function."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Far above the roundings of 16-bit numbers, far below the effect of another mask.
_TOLERANCE = 0.05


def compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Compares results of a peer with ours.

    Both the largest and the root mean square difference count: the largest alone would miss errors
    in rows of small numbers, such as the later ones of a causal mask.

    Raises:
        ValueError: they differ by more than roundings.
    """
    shapes = [[tuple(t.shape) for t in side] for side in (results, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the result has shape {shapes[0]}, ours has {shapes[1]}")
    for result, ours in zip(results, expected, strict=True):
        gap = result.float() - ours.float()
        largest, scale = float(gap.abs().max()), float(ours.float().abs().max())
        rms, rms_scale = (float(t.float().square().mean().sqrt()) for t in (gap, ours))
        # Not "above": a NaN is neither above nor below.
        if not (largest <= _TOLERANCE * scale and rms <= _TOLERANCE * rms_scale):
            raise ValueError(f"the result differs from ours by {largest:.3g}, rms {rms:.3g}")
