from __future__ import annotations

import math

import pytest
import torch
from bits import bits_equal
from flash_attn_deterministic.reference import ieee

DTYPES = [torch.float32, torch.float64]


def _ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    spacing = torch.finfo(got.dtype).eps * exact.abs()
    return ((got.double() - exact).abs() / spacing.double()).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_is_accurate(dtype: torch.dtype) -> None:
    x = torch.linspace(-120.0, 120.0, 100_001, dtype=dtype)
    assert _ulps(ieee.exp2(x), torch.exp2(x.double())) < 2.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_of_integers_is_exact(dtype: torch.dtype) -> None:
    x = torch.arange(-126, 128, dtype=dtype)
    assert bits_equal(ieee.exp2(x), torch.tensor([2.0**n for n in range(-126, 128)], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_of_special_values(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([-inf, -1e30, -0.0, 0.0, 1e30, inf, nan], dtype=dtype)
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0, inf, inf, nan], dtype=dtype)
    torch.testing.assert_close(ieee.exp2(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_leaves_its_argument(dtype: torch.dtype) -> None:
    x = torch.tensor([0.3, -4.7], dtype=dtype)
    before = x.clone()
    ieee.exp2(x)
    assert bits_equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_is_accurate(dtype: torch.dtype) -> None:
    x = torch.cat([torch.logspace(-30, 30, 10_001), torch.linspace(0.5, 2.0, 10_001)]).to(dtype)
    exact = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    near_one = (x - 1).abs() < 1e-6
    assert _ulps(ieee.log(x)[~near_one], exact[~near_one]) < 2.0
    torch.testing.assert_close(
        ieee.log(x)[near_one].double(), exact[near_one], rtol=1e-6, atol=1e-15
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_of_special_values(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, math.inf, math.nan], dtype=dtype)
    expected = torch.tensor([0.0, math.inf, math.nan], dtype=dtype)
    torch.testing.assert_close(ieee.log(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_is_accurate(dtype: torch.dtype) -> None:
    x = torch.cat([torch.logspace(-12, 2, 20_001), torch.linspace(0.0, 25.0, 20_001)[1:]])
    x = torch.cat([x, -x]).to(dtype)
    exact = torch.tensor([math.tanh(value) for value in x.tolist()], dtype=torch.float64)
    assert _ulps(ieee.tanh(x), exact) < 2.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_of_special_values(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([-inf, -1e30, -25.0, -0.0, 0.0, 25.0, 1e30, inf, nan], dtype=dtype)
    expected = torch.tensor([-1.0, -1.0, -1.0, -0.0, 0.0, 1.0, 1.0, 1.0, nan], dtype=dtype)
    assert bits_equal(ieee.tanh(x)[:-1], expected[:-1])
    assert ieee.tanh(x)[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_is_odd_and_never_above_one(dtype: torch.dtype) -> None:
    x = torch.linspace(0.0, 30.0, 100_001, dtype=dtype)
    assert bits_equal(ieee.tanh(-x), -ieee.tanh(x))
    assert ieee.tanh(x).max() == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [ieee.exp2, ieee.log, ieee.tanh], ids=["exp2", "log", "tanh"])
def test_bits_of_an_element_depend_on_it_alone(dtype: torch.dtype, function) -> None:  # type: ignore[no-untyped-def]
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x * 40).to(dtype) if function is ieee.log else (x * -40).to(dtype)
    whole = function(x)
    for offset in (0, 1, 3, 15, 16, 17):
        for length in (1, 7, 8, 9, 15, 16, 17, 33, 1000):
            assert bits_equal(function(x[offset:][:length]), whole[offset:][:length])
    assert bits_equal(function(x[::3]), whole[::3])
    assert bits_equal(function(x.view(64, 64).t()), whole.view(64, 64).t())
    assert bits_equal(function(x.view(64, 64)[:, :37]), whole.view(64, 64)[:, :37])
