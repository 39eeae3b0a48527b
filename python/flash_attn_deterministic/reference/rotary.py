"""Rotary position embedding."""

from __future__ import annotations

import torch


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotates pairs of the first elements of each row, in float32, rounded to x's dtype.

    Args:
        x: (seqlen, nheads, head_dim).
        cos: (seqlen, rotary_dim / 2), rotary_dim <= head_dim; the elements after it stay.
        sin: like cos.
        interleaved: whether pairs are (0, 1), (2, 3) and so on, rather than (0, rotary_dim / 2),
            (1, rotary_dim / 2 + 1) and so on.

    Returns:
        A new tensor like x.
    """
    half = cos.shape[1]
    left = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    right = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    real, imaginary = x[..., left].to(dtype), x[..., right].to(dtype)
    rotated = x.clone()
    rotated[..., left] = (real * cos - imaginary * sin).to(x.dtype)
    rotated[..., right] = (real * sin + imaginary * cos).to(x.dtype)
    return rotated
