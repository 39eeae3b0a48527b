"""The baseline library computes attention: a wrong yardstick would spoil every comparison."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic.verify import bounds
from flash_attn_deterministic.verify.exact import Definition
from flash_attn_deterministic_lab.attentions.baseline import Baseline
from flash_attn_deterministic_lab.bench.cases import KERNEL_HEAD_DIMS

from tests.gpu.attention import DTYPES, make_qkv

pytestmark = pytest.mark.gpu

_DEFAULT = Path(__file__).resolve().parents[3] / "build" / "baseline" / "libfa2_baseline.so"
LIBRARY = Path(os.environ.get("FA2_BASELINE", _DEFAULT))

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
HEAD_DIM = pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
SPLIT_HEAD_DIMS = (64, 128)  # of the split kernel, in a full build


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} does not exist; `nox -s baseline` builds it")
    return Baseline(LIBRARY)


def skip_unless_held(baseline: Baseline, q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
    """Skips the running test if the library was built without the kernels."""
    for backward in (False, True):
        if not baseline.holds(q, k, causal=causal, backward=backward):
            pytest.skip(f"the library holds no {q.dtype} kernels of head_dim {q.shape[-1]}")


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
    if num_splits != 1 and head_dim not in SPLIT_HEAD_DIMS:
        pytest.skip(f"the library holds no split kernel of head_dim {head_dim}")
    q, k, v = make_qkv((2, seqlen_q, 8, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    skip_unless_held(baseline, q, k, causal and seqlen_q > 1)
    out, softmax_lse = baseline.forward(q, k, v, causal=causal, num_splits=num_splits)
    exact = Definition(causal=causal).forward(q, k, v)
    found = bounds.forward({"out": out, "softmax_lse": softmax_lse}, exact, q.dtype, 0.0)
    assert all(error.ratio <= 1 for error in found.values()), found


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("nheads_k", [2, 4], ids=["gqa", "mha"])
@CAUSAL
@DTYPE
@HEAD_DIM
def test_backward(
    baseline: Baseline, head_dim: int, dtype: str, causal: bool, nheads_k: int, deterministic: bool
) -> None:
    q, k, v = make_qkv((2, 500, 4, head_dim), nheads_k=nheads_k, dtype=DTYPES[dtype])
    skip_unless_held(baseline, q, k, causal)
    dout = make_qkv((2, 500, 4, head_dim), dtype=DTYPES[dtype], seed=1)[0]
    out, lse = baseline.forward(q, k, v, causal=causal, num_splits=1)
    found = baseline.backward(
        dout, q, k, v, out, lse, causal=causal, deterministic=deterministic
    )  # fmt: skip
    definition = Definition(causal)
    wanted = (definition.forward(q, k, v).out, *definition.gradients(q, k, v, dout))
    for name, one, exact in zip(("out", "dq", "dk", "dv"), (out, *found), wanted, strict=True):
        error = (one.double() - exact).norm() / exact.norm()
        # Three roundings to 8 (bf16) or 11 bits: P, dS and the result.
        assert error <= 3 * torch.finfo(DTYPES[dtype]).eps, name
