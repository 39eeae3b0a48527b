"""Comparing tensors bit by bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from flash_attn_deterministic.verify.shared.bits import bits


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; unlike torch.equal, NaN == NaN and 0 != -0."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    return torch.equal(bits(left), bits(right))


def all_equal(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    """Whether as many tensors hold the same bits."""
    return all(bits_equal(a, b) for a, b in zip(left, right, strict=True))
