from __future__ import annotations

import math

import pytest
import torch
from flash_attn_deterministic.verify.shared.bits import difference


def test_zeros_of_both_signs_differ() -> None:
    found = difference(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert found is not None
    assert (found.elements, found.differing, found.index) == (2, 1, (1,))
    assert found.left is not None
    assert found.right is not None
    assert (found.left.bits, found.right.bits) == ("0x00000000", "0x80000000")
    assert (found.left.value, found.right.value) == ("0.0", "-0.0")


def test_a_nan_equals_itself() -> None:
    nan = torch.tensor([math.nan, 1.0], dtype=torch.bfloat16)
    assert difference(nan, nan.clone()) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_first_of_several(dtype: torch.dtype) -> None:
    left = torch.zeros(3, 4, dtype=dtype)
    right = left.clone()
    right[1, 2] = right[2, 0] = 1.0
    found = difference(left, right)
    assert found is not None
    assert (found.differing, found.index) == (2, (1, 2))
    assert found.right is not None
    assert len(found.right.bits) == 2 + 2 * dtype.itemsize
    assert "2 of 12 elements differ" in found.words


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(torch.zeros(2, dtype=torch.float64), "float64 (2,)", id="dtype"),
        pytest.param(torch.zeros(3), "float32 (3,)", id="shape"),
    ],
)
def test_other_kinds_of_tensors_differ(other: torch.Tensor, words: str) -> None:
    found = difference(torch.zeros(2), other)
    assert found is not None
    assert found.index is None
    assert words in found.words


def test_views_are_compared_as_they_look() -> None:
    left = torch.arange(6.0).view(2, 3)
    assert difference(left.T, left.T.contiguous()) is None
