"""The backward against float64, measured in errors of torch's own backward in the same dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.attention import DTYPES, HEAD_DIMS, torch_flash
from tests.gpu.gradients import (
    ALL_FEATURES,
    GradientCall,
    GradientErrors,
    Gradients,
    defined,
    draw_call,
    gradient_errors,
    kept,
)

pytestmark = pytest.mark.gpu

ALLOWED = 2.0  # times the error of torch

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
CAUSAL = pytest.mark.parametrize("feature", ["full", "causal"])

# seqlen_q, seqlen_k, batch, nheads, nheads_k
CASES = {
    "one-key": (1, 1, 2, 4, 4),
    "below-tiles": (63, 127, 2, 4, 4),
    "above-tiles": (129, 129, 2, 4, 1),
    "one-query": (1, 1000, 2, 8, 2),
    "more-queries": (1000, 129, 2, 8, 2),
    "more-keys": (129, 1000, 1, 8, 2),
    "1000-gqa": (1000, 1000, 1, 8, 2),
    "2048-mha": (2048, 2048, 1, 2, 2),
}


def draw_case(head_dim: int, dtype: str, feature: str, case: str) -> GradientCall:
    seqlen_q, seqlen_k, batch, nheads, nheads_k = CASES[case]
    return draw_call(
        head_dim,
        dtype,
        feature,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        nheads=nheads,
        nheads_k=nheads_k,
        seed=head_dim,
    )


def torchs_own(call: GradientCall) -> Gradients:
    """The gradients of torch's flash backend, in the dtype of the call."""
    q, k, v = (t.detach().requires_grad_() for t in (call.q, call.k, call.v))
    out, _ = torch_flash(q, k, v, q.shape[3] ** -0.5, call.options.get("causal", False))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), call.dout)
    return dq, dk, dv


def check(
    ours: dict[str, GradientErrors],
    theirs: dict[str, GradientErrors],
    exact: Gradients,
    dtype: torch.dtype,
    softcap: float = 0.0,
) -> None:
    # An error so small that its ratio to another says nothing: 1/64 unit in the last place of the
    # largest gradient. (With one key, dq and dk are 0, and what comes out is the error alone.)
    # The hardware's tanh is off by up to 2^-10.
    unit = torch.finfo(dtype).eps / 64 + softcap * 2**-10
    floor = unit * max(float(t.abs().max()) for t in exact)
    for name, own in ours.items():
        other = theirs[name]
        assert other.largest < float("inf"), f"{name}: torch's own gradient is not finite"
        assert own.largest <= ALLOWED * other.largest + floor, (name, own, other)
        assert own.rmse <= ALLOWED * other.rmse + floor, (name, own, other)


@pytest.mark.parametrize("case", CASES)
@CAUSAL
@DTYPE
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"d{head_dim}")
def test_no_more_than_twice_torchs_error(
    head_dim: int, dtype: str, feature: str, case: str
) -> None:
    call = draw_case(head_dim, dtype, feature, case)
    _, exact = defined(call, torch.float64)
    ours, theirs = (gradient_errors(g, exact) for g in (call(), torchs_own(call)))
    check(ours, theirs, exact, DTYPES[dtype])


@pytest.mark.parametrize("deterministic", [True, "never"], ids=["turns", "atomics"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(333, 333), (129, 500), (500, 129)], ids=["square", "keys", "rows"]
)
@pytest.mark.parametrize("feature", ALL_FEATURES)
@DTYPE
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256], ids=lambda d: f"d{d}")
def test_feature(
    head_dim: int, dtype: str, feature: str, seqlen_q: int, seqlen_k: int, deterministic: bool | str
) -> None:
    """torch's flash backend has none of these: against plain torch in the same dtype.

    That rounds more often, so there is a bound of its own: three roundings, of P, dS and the
    result, and the hardware's tanh.
    """
    call = draw_call(head_dim, dtype, feature, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    keep = kept(call) if "dropout_p" in call.options else None
    _, exact = defined(call, torch.float64, keep)
    _, plain = defined(call, DTYPES[dtype], keep)
    ours = gradient_errors(call.with_options(deterministic=deterministic)(), exact)
    softcap = call.options.get("softcap", 0.0)
    check(ours, gradient_errors(plain, exact), exact, DTYPES[dtype], softcap)
    bound = 3 * torch.finfo(DTYPES[dtype]).eps + softcap * 2**-9
    for name, own in ours.items():
        assert own.relative <= bound, (name, own)


@pytest.mark.parametrize("softmax_scale", [0.01, 1.0])
@CAUSAL
def test_softmax_scale(softmax_scale: float, feature: str) -> None:
    call = draw_call(64, "bf16", feature)
    # q carries what the scale would: the definition's own is head_dim ** -0.5.
    factor = 2.0 ** round(torch.tensor(softmax_scale * 8).log2().item())
    scaled = replace(call, q=call.q * factor)
    _, (dq, dk, dv) = defined(scaled, torch.float64)
    exact = (dq * factor, dk, dv)
    found = call.with_options(softmax_scale=factor / 8)()
    for name, own in gradient_errors(found, exact).items():
        assert own.relative <= 3 * torch.finfo(torch.bfloat16).eps, (name, own)


@DTYPE
def test_large_scores_stay_finite(dtype: str) -> None:
    call = draw_call(64, dtype, "causal", seqlen_q=256)
    for gradient in replace(call, q=call.q * 1000)():
        assert gradient.isfinite().all()
