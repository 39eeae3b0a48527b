"""The baseline library computes attention: a wrong yardstick would spoil every comparison."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.benchmarks.baseline import HEAD_DIMS, Baseline, Packed
from tests.gpu.attention import DTYPES, errors, exact, make_qkv, torch_flash

pytestmark = pytest.mark.gpu

_DEFAULT = Path(__file__).resolve().parents[2] / "build" / "baseline" / "libfa2_baseline.so"
LIBRARY = Path(os.environ.get("FA2_BASELINE", _DEFAULT))

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} does not exist; `nox -s baseline` builds it")
    return Baseline(LIBRARY)


@CAUSAL
@pytest.mark.parametrize("num_splits", [0, 1, 3, 20])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(256, 256), (200, 333), (1, 3000)], ids=["even", "uneven", "decode"]
)
@DTYPE
@HEAD_DIM
def test_forward(
    baseline: Baseline,
    head_dim: int,
    dtype: str,
    seqlen_q: int,
    seqlen_k: int,
    num_splits: int,
    causal: bool,
) -> None:
    q, k, v = make_qkv((2, seqlen_q, 8, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    scale = head_dim**-0.5
    reference = exact(q, k, v, scale, causal)
    ours = errors(baseline.forward(q, k, v, causal=causal, num_splits=num_splits), reference)
    theirs = errors(torch_flash(q, k, v, scale, causal), reference)
    assert theirs.finite
    floor = torch.finfo(DTYPES[dtype]).eps / 64
    assert ours.largest <= 2 * theirs.largest + floor
    assert ours.rmse <= 2 * theirs.rmse + floor
    assert ours.lse <= 2 * theirs.lse + 1e-5


@CAUSAL
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("nheads_k", [2, 8], ids=["gqa", "mha"])
@pytest.mark.parametrize("seqlen", [256, 333], ids=["even", "uneven"])
@DTYPE
@HEAD_DIM
def test_backward(
    baseline: Baseline,
    head_dim: int,
    dtype: str,
    seqlen: int,
    nheads_k: int,
    deterministic: bool,
    causal: bool,
) -> None:
    q, k, v = make_qkv((2, seqlen, 8, head_dim), nheads_k=nheads_k, dtype=DTYPES[dtype])
    dout = make_qkv((2, seqlen, 8, head_dim), dtype=DTYPES[dtype], seed=1)[0]
    out, softmax_lse = baseline.forward(q, k, v, causal=causal)
    gradients = baseline.backward(
        dout, q, k, v, out, softmax_lse, causal=causal, deterministic=deterministic
    )
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    q64, k64, v64 = (t.transpose(1, 2) for t in leaves)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact_out = torch.nn.functional.scaled_dot_product_attention(
            q64, k64, v64, is_causal=causal, enable_gqa=True
        )
    expected = torch.autograd.grad(exact_out, leaves, dout.transpose(1, 2).double())
    for name, gradient, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        error = (gradient.double() - wanted).norm() / wanted.norm()
        # Three roundings to 8 (bf16) or 11 bits: P, dS and the result.
        assert error <= 3 * torch.finfo(DTYPES[dtype]).eps, name


LENGTHS = (333, 1, 256, 64, 700)


@CAUSAL
@pytest.mark.parametrize("nheads_k", [2, 8], ids=["gqa", "mha"])
@DTYPE
@HEAD_DIM
def test_packed_sequences(
    baseline: Baseline, head_dim: int, dtype: str, nheads_k: int, causal: bool
) -> None:
    """Each sequence comes out as it does alone."""
    shape = (1, sum(LENGTHS), 8, head_dim)
    q, k, v = (t[0] for t in make_qkv(shape, nheads_k=nheads_k, dtype=DTYPES[dtype]))
    dout = make_qkv(shape, dtype=DTYPES[dtype], seed=1)[0][0]
    packed = Packed.of(LENGTHS)
    out, lse = baseline.varlen_forward(q, k, v, packed, causal=causal)
    eps = torch.finfo(DTYPES[dtype]).eps
    for deterministic in (False, True):
        gradients = baseline.varlen_backward(
            dout, q, k, v, out, lse, packed, causal=causal, deterministic=deterministic
        )
        begin = 0
        for length in LENGTHS:
            own = slice(begin, begin + length)
            begin += length
            q_one, k_one, v_one = (t[None, own] for t in (q, k, v))
            # Not its heuristic: it splits keys, and packed sequences are never split.
            alone, alone_lse = baseline.forward(q_one, k_one, v_one, causal=causal, num_splits=1)
            torch.testing.assert_close(out[None, own], alone, rtol=eps, atol=eps / 8)
            torch.testing.assert_close(lse[None, :, own], alone_lse, rtol=1e-5, atol=1e-5)
            wanted = baseline.backward(
                dout[None, own], q_one, k_one, v_one, alone, alone_lse, causal=causal
            )
            for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
                difference = (gradient[None, own].double() - expected.double()).norm()
                # With one key dq and dk are 0 but for rounding.
                assert difference <= eps * (expected.double().norm() + 1), name
