"""The forward takes no memory beyond its results and the scratch that explain() names."""

from __future__ import annotations

import gc

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func

from tests.gpu.attention import DTYPES, attend, make_qkv, skip_unless_built

pytestmark = pytest.mark.gpu

ALLOWED = 2**20
COUNTER = 4  # bytes, of the row blocks that CTAs of the sm90 family have taken


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"),
    [(4, 4096, 4096), (1, 1, 32_768), (2, 1, 131_072), (2, 512, 8192)],
    ids=["prefill", "decode", "long-decode", "chunk"],
)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16"), (256, "bf16")])
def test_scratch_is_what_explain_says(
    head_dim: int, dtype: str, batch: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((batch, seqlen_q, 8, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    attend(q, k, v, causal=causal)  # loads the kernel
    gc.collect()  # what earlier tests left must not be freed in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, softmax_lse = attend(q, k, v, causal=causal)
    torch.cuda.synchronize()
    results = out.nbytes + softmax_lse.nbytes
    plan = explain(flash_attn_func, q, k, v, causal=causal)
    assert (plan.scratch_bytes <= COUNTER) == (plan.path == "one-cta")
    whole = batch == 4
    few = ("few-rows", "scores-first")
    assert plan.path in (("one-cta",) if whole else few if seqlen_q == 1 else ("parts",))
    scratch = torch.cuda.max_memory_allocated() - before - results
    assert plan.scratch_bytes <= scratch <= plan.scratch_bytes + ALLOWED
