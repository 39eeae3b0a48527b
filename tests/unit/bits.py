"""Comparing tensors bit by bit."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; unlike torch.equal, NaN == NaN and 0 != -0."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    integer = _INTEGERS[left.element_size()]
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))
