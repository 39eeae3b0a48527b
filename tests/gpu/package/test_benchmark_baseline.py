"""The baseline library computes attention: a wrong yardstick would spoil every comparison."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.verify import bounds
from flash_attn_deterministic.verify.exact import Definition
from flash_attn_deterministic_lab.attentions import Packed
from flash_attn_deterministic_lab.attentions.upstream import HEAD_DIMS, Baseline, Scores

from tests.gpu.attention import DTYPES, make_qkv, skip_unless_built

pytestmark = pytest.mark.gpu

_DEFAULT = Path(__file__).resolve().parents[3] / "build" / "baseline" / "libfa2_baseline.so"
LIBRARY = Path(os.environ.get("FA2_BASELINE", _DEFAULT))

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)
SPLIT_HEAD_DIMS = (64, 128)  # of the split kernel, in a full build


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} does not exist; `nox -s baseline` builds it")
    return Baseline(LIBRARY)


def skip_unless_held(
    baseline: Baseline, head_dim: int, dtype: str, causal: bool, scores: Scores | None = None
) -> None:
    """Skips the running test if the library was built without the kernels."""
    for backward in (False, True):
        held = baseline.holds(
            head_dim, DTYPES[dtype], causal, scores or Scores(), backward=backward
        )
        if not held:
            pytest.skip(f"the library holds no {dtype} kernels of head_dim {head_dim} for this")


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
    skip_unless_held(baseline, head_dim, dtype, causal and seqlen_q > 1)
    if num_splits != 1 and head_dim not in SPLIT_HEAD_DIMS:
        pytest.skip(f"the library holds no split kernel of head_dim {head_dim}")
    q, k, v = make_qkv((2, seqlen_q, 8, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    out, softmax_lse = baseline.forward(q, k, v, causal=causal, num_splits=num_splits)
    exact = Definition(causal=causal).forward(q, k, v)
    found = bounds.forward({"out": out, "softmax_lse": softmax_lse}, exact, q.dtype, 0.0)
    assert all(error.ratio <= 1 for error in found.values()), found


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
    skip_unless_held(baseline, head_dim, dtype, causal)
    q, k, v = make_qkv((2, seqlen, 8, head_dim), nheads_k=nheads_k, dtype=DTYPES[dtype])
    dout = make_qkv((2, seqlen, 8, head_dim), dtype=DTYPES[dtype], seed=1)[0]
    out, softmax_lse = baseline.forward(q, k, v, causal=causal, num_splits=1)
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
    skip_unless_held(baseline, head_dim, dtype, causal)
    shape = (1, sum(LENGTHS), 8, head_dim)
    q, k, v = (t[0] for t in make_qkv(shape, nheads_k=nheads_k, dtype=DTYPES[dtype]))
    dout = make_qkv(shape, dtype=DTYPES[dtype], seed=1)[0][0]
    packed = Packed.of(LENGTHS, "cuda")
    out, lse = baseline.forward(q, k, v, causal=causal, packed=packed)
    eps = torch.finfo(DTYPES[dtype]).eps
    for deterministic in (False, True):
        gradients = baseline.backward(
            dout, q, k, v, out, lse, causal=causal, deterministic=deterministic, packed=packed
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


FEATURES = {
    "window": (False, Scores(window=(100, 0))),
    "softcap": (True, Scores(softcap=3.0)),
    "alibi": (True, Scores(alibi_slopes=torch.tensor([0.5, 0.1, 0.03, 0.0]))),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_features(baseline: Baseline, head_dim: int, feature: str, deterministic: bool) -> None:
    """Near ours, which other tests compare with float64; ALiBi's softmax_lse is another."""
    causal, scores = FEATURES[feature]
    if scores.alibi_slopes is not None:
        scores = Scores(alibi_slopes=scores.alibi_slopes.cuda())
    skip_unless_held(baseline, head_dim, "bf16", causal, scores)
    skip_unless_built(head_dim, "bf16", "bwd")
    q, k, v = make_qkv((2, 500, 4, head_dim), nheads_k=2)
    dout = make_qkv((2, 500, 4, head_dim), seed=1)[0]
    out, lse = baseline.forward(q, k, v, causal=causal, scores=scores)
    found = baseline.backward(
        dout, q, k, v, out, lse, causal=causal, deterministic=deterministic, scores=scores
    )
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    ours = flash_attn_func(
        leaves[0],
        leaves[1],
        leaves[2],
        causal=causal,
        window_size=scores.window,
        softcap=scores.softcap,
        alibi_slopes=scores.alibi_slopes,
    )
    plain = flash_attn_func(q, k, v, causal=causal)
    expected = torch.autograd.grad(ours, leaves, dout)
    assert (ours - plain).norm() > 0.05 * plain.norm()  # the feature shows
    pairs = zip(("out", "dq", "dk", "dv"), (out, *found), (ours, *expected), strict=True)
    for name, one, other in pairs:
        assert (one.double() - other.double()).norm() <= 0.02 * other.double().norm(), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout(baseline: Baseline, head_dim: int) -> None:
    """Drops as much as it should, of all rows, and the backward drops the same."""
    scores = Scores(dropout_p=0.25, rng_state=torch.tensor([7, 0], device="cuda"))
    skip_unless_held(baseline, head_dim, "bf16", True, scores)
    q, k, v = make_qkv((2, 1024, 4, head_dim))
    v = torch.ones_like(v)
    out, lse = baseline.forward(q, k, v, causal=True, scores=scores)
    kept = out[..., 0].float()  # the sum of what was kept, over 0.75
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.01)
    assert 0.01 < float(kept[:, 512:].std()) < 0.1
    dout = torch.ones_like(q)
    _, _, dv = baseline.backward(dout, q, k, v, out, lse, causal=True, scores=scores)
    # Each probability that was kept adds once to out and once to dv.
    total = float(kept.sum())
    assert float(dv[..., 0].float().sum()) == pytest.approx(total, rel=0.01)
    other = Scores(dropout_p=0.25, rng_state=torch.tensor([8, 0], device="cuda"))
    assert not torch.equal(out, baseline.forward(q, k, v, causal=True, scores=other)[0])
