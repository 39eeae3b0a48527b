from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bits import bits_equal
from flash_attn_deterministic import tree


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_bits_are_equal_nan_included(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("nan")], dtype=dtype)
    assert bits_equal(values, values.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_of_other_sign_differ(dtype: torch.dtype) -> None:
    assert not bits_equal(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))


def test_chunks_of_rows_are_those_of_the_kernels() -> None:
    table = json.loads((Path(__file__).parents[3] / "cpp" / "instances.json").read_text())
    assert table["chunk_rows"] == tree.CHUNK_ROWS
