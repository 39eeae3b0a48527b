"""The forward against float64, measured in errors of torch's own attention."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.attention import (
    ACCURACY_CASES,
    DTYPES,
    HEAD_DIMS,
    Case,
    Measured,
    attend,
    exact,
    make_qkv,
    measure_accuracy,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

ALLOWED = 2.0  # times the error of torch's flash attention in the same dtype
LSE_FLOOR = 1e-5


def floor(dtype: str) -> float:
    """An error so small that its ratio to another says nothing: 1/64 unit in the last place."""
    return torch.finfo(DTYPES[dtype]).eps / 64


def check(measured: Measured, dtype: str) -> None:
    ours, theirs = measured.ours, measured.torch
    assert theirs.finite, measured  # otherwise the limits below would hold for anything
    assert ours.largest <= ALLOWED * theirs.largest + floor(dtype), measured
    assert ours.rmse <= ALLOWED * theirs.rmse + floor(dtype), measured
    assert ours.lse <= ALLOWED * theirs.lse + LSE_FLOOR, measured


@pytest.mark.parametrize("case", ACCURACY_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"d{head_dim}")
def test_no_more_than_twice_torchs_error(
    head_dim: int, dtype: str, causal: bool, case: Case
) -> None:
    skip_unless_built(head_dim, dtype)
    check(measure_accuracy(case, head_dim, dtype, causal), dtype)


@pytest.mark.parametrize("softmax_scale", [0.01, 1.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_softmax_scale(softmax_scale: float, causal: bool) -> None:
    skip_unless_built(64, "bf16")
    case = Case("scale", "200", "300", 2, 4, 2)
    check(measure_accuracy(case, 64, "bf16", causal, softmax_scale), "bf16")


def test_large_scores_stay_finite() -> None:
    """Scores in the ten thousands: the running maximum has to carry the exponent."""
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv((1, 256, 2, 64))
    q = q * 1000
    out, softmax_lse = attend(q, k, v, 1.0, True)
    assert out.isfinite().all()
    assert softmax_lse.isfinite().all()
    exact_out, exact_lse = exact(q, k, v, 1.0, True)
    # One key takes all the weight wherever it leads by more than float32's rounding of the scores.
    torch.testing.assert_close(softmax_lse.double(), exact_lse, rtol=1e-5, atol=5e-2)
    assert (out.double() - exact_out).square().mean().sqrt() <= 0.01
