"""The baseline library computes attention: a wrong yardstick would spoil every comparison."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic.verify import bounds
from flash_attn_deterministic.verify.exact import Definition
from flash_attn_deterministic_lab.attentions import Packed
from flash_attn_deterministic_lab.attentions.upstream import HEAD_DIMS, Baseline, Scores

from tests.gpu.attention import DTYPES, make_qkv

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


FEATURES = {
    "full": (False, Scores()),
    "causal": (True, Scores()),
    "window": (False, Scores(window=(100, 0))),
    "softcap": (True, Scores(softcap=3.0)),
    "alibi": (True, Scores(alibi_slopes=torch.tensor([0.5, 0.1, 0.03, 0.0]))),
    "dropout": (True, Scores(dropout_p=0.25, rng_state=torch.tensor([7, 0]))),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("nheads_k", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("feature", FEATURES)
@DTYPE
@HEAD_DIM
def test_backward(
    baseline: Baseline,
    head_dim: int,
    dtype: str,
    feature: str,
    nheads_k: int,
    deterministic: bool,
) -> None:
    """Against the definition; of dropout, that out and dv sum up what was kept."""
    causal, scores = FEATURES[feature]
    slopes, state = (
        None if one is None else one.cuda() for one in (scores.alibi_slopes, scores.rng_state)
    )
    scores = replace(scores, alibi_slopes=slopes, rng_state=state)
    skip_unless_held(baseline, head_dim, dtype, causal, scores)
    q, k, v = make_qkv((2, 500, 4, head_dim), nheads_k=nheads_k, dtype=DTYPES[dtype])
    dout = make_qkv((2, 500, 4, head_dim), dtype=DTYPES[dtype], seed=1)[0]
    if feature == "dropout":
        v, dout = torch.ones_like(v), torch.ones_like(dout)
    out, lse = baseline.forward(q, k, v, causal=causal, num_splits=1, scores=scores)
    options: dict[str, Any] = {"deterministic": deterministic, "scores": scores}
    found = baseline.backward(dout, q, k, v, out, lse, causal=causal, **options)
    if feature == "dropout":
        kept = out[..., 0].double()
        assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
        assert 0.01 < float(kept[:, 250:].std()) < 0.1
        total = pytest.approx(float(kept.sum()), rel=0.01)
        assert float(found[2][..., 0].double().sum()) == total
        return
    definition = Definition(
        causal, scores.window, scores.softcap,
        alibi_slopes=None if slopes is None else slopes.expand(2, -1),
    )  # fmt: skip
    wanted = (definition.forward(q, k, v).out, *definition.gradients(q, k, v, dout))
    for name, one, exact in zip(("out", "dq", "dk", "dv"), (out, *found), wanted, strict=True):
        error = (one.double() - exact).norm() / exact.norm()
        # Three roundings to 8 (bf16) or 11 bits: P, dS and the result.
        plain = feature in ("full", "causal")
        assert error <= (3 * torch.finfo(DTYPES[dtype]).eps if plain else 0.02), name


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
    packed = Packed.of(LENGTHS, LENGTHS, "cuda")
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
