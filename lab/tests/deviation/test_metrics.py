from __future__ import annotations

import math

import pytest
import torch
from flash_attn_deterministic_lab.deviation.numbers.formats import parse_format
from flash_attn_deterministic_lab.deviation.numbers.metrics import deviation, wasserstein
from flash_attn_deterministic_lab.errors import ArgumentError
from scipy import stats


def test_every_metric_of_a_known_difference() -> None:
    golden = torch.tensor([[1.0, -2.0, 4.0, 0.5]])
    actual = golden + torch.tensor([[2.0**-7, 0.0, -(2.0**-4), 0.0]])
    found = deviation(actual, golden, parse_format("bf16"))
    squares = 2.0**-14 + 2.0**-8
    expected = {
        "max": 2.0**-4,
        "mean": (2.0**-7 + 2.0**-4) / 4,
        "rmse": math.sqrt(squares / 4),
        "relative": math.sqrt(squares) / math.sqrt(1 + 4 + 16 + 0.25),
        "max_relative": 2.0**-6,
        "ulp_max": 2.0,  # the row's largest is 4, where a gap is 2**-5
        "ulp_mean": (0.25 + 2) / 4,
        "bias": (2.0**-7 - 2.0**-4) / 4,
    }
    expected["std"] = math.sqrt(squares / 4 - expected["bias"] ** 2)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == [pytest.approx(value, rel=1e-12)], name


def test_leading_dimensions_are_counted_apart() -> None:
    golden = torch.zeros(2, 3, 4)
    actual = torch.arange(2.0)[:, None, None].expand(2, 3, 4)
    assert deviation(actual, golden, parse_format("bf16"))["max"] == [0.0, 1.0]


def test_shapes_must_agree() -> None:
    with pytest.raises(ArgumentError, match="actual: expected the shape of golden"):
        deviation(torch.zeros(2, 3), torch.zeros(3, 2), parse_format("bf16"))


def test_an_element_near_0_does_not_count_in_its_own_gap() -> None:
    golden = torch.tensor([[[1.0, 1e-30], [2.0, 2.0]]])
    found = deviation(golden + 2.0**-8, golden, parse_format("bf16"))
    assert found["ulp_max"] == [0.5]


@pytest.mark.parametrize("shape", [(1,), (5,), (40, 30)], ids=str)
def test_wasserstein_is_scipys(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for _ in range(2))
    expected = stats.wasserstein_distance(left.flatten().numpy(), right.flatten().numpy())
    assert wasserstein(left, right) == pytest.approx(expected, rel=1e-6)
    assert wasserstein(left, left.flip(0)) == 0
