"""Scores in the ten thousands, and scales far from the default."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.verify.exact import Definition

from tests.gpu.attention import DTYPES, make_qkv, skip_unless_built
from tests.gpu.gradients import draw_call

pytestmark = pytest.mark.gpu


def test_large_scores_stay_finite() -> None:
    """The running maximum has to carry the exponent."""
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv((1, 256, 2, 64))
    q = q * 1000
    out, softmax_lse, _ = flash_attn_func(
        q, k, v, softmax_scale=1.0, causal=True, return_attn_probs=True
    )
    assert out.isfinite().all()
    assert softmax_lse.isfinite().all()
    wanted = Definition(causal=True, softmax_scale=1.0).forward(q, k, v)
    # One key takes all the weight wherever it leads by more than float32's rounding of the scores.
    torch.testing.assert_close(softmax_lse.double(), wanted.softmax_lse, rtol=1e-5, atol=5e-2)
    assert (out.double() - wanted.out).square().mean().sqrt() <= 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_large_scores_stay_finite(dtype: str) -> None:
    call = draw_call(64, dtype, "causal", seqlen_q=256)
    for gradient in replace(call, q=call.q * 1000).gradients().values():
        assert gradient.isfinite().all()
