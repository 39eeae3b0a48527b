from __future__ import annotations

import pytest
import torch
from bits import bits_equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_bits_are_equal_nan_included(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("nan")], dtype=dtype)
    assert bits_equal(values, values.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_of_other_sign_differ(dtype: torch.dtype) -> None:
    assert not bits_equal(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))
