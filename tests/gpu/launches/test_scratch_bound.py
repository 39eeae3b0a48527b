"""Scratch memory of the forward has an upper limit, and no bits depend on how it is kept."""

from __future__ import annotations

import gc

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import assert_same, make_qkv, skip_unless_built

pytestmark = pytest.mark.gpu

LIMIT = 64 * 2**20
ALLOWED = 2**20  # what torch's allocator rounds up

# batch, seqlen_q, seqlen_k, nheads, nheads_k: without a limit, from 0.1 to 8.7 GB at splits of 2048
SHAPES = {
    "1k-on-128k": (1, 1024, 131_072, 32, 8),
    "1k-on-1m": (1, 1024, 1_048_576, 32, 8),
    "few-rows-on-1m": (8, 16, 1_048_576, 32, 8),
    "decode-of-a-large-batch": (512, 1, 131_072, 64, 8),
    "one-block-of-rows": (1, 64, 1_048_576, 8, 1),
    "mha": (4, 256, 65_536, 32, 32),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("split_size", [64, 512, 2048, 8192])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_plan_takes_more(
    shape: tuple[int, int, int, int, int], head_dim: int, split_size: int, causal: bool
) -> None:
    batch, seqlen_q, seqlen_k, nheads, nheads_k = shape
    one = torch.empty(1, 1, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    q = one.expand(batch, seqlen_q, nheads, head_dim)
    k = one.expand(batch, seqlen_k, nheads_k, head_dim)
    plan = explain(flash_attn_func, q, k, k, causal=causal, split_size=split_size)
    assert plan.num_splits == -(-seqlen_k // split_size)
    assert plan.scratch_bytes <= LIMIT
    counter = 4  # bytes, of the row blocks that CTAs of the sm90 family have taken
    assert (plan.scratch_bytes <= counter) == (plan.path == "one-cta")


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, split_size: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """Runs a call twice.

    Returns:
        out and softmax_lse, and the bytes that the second call took besides them.
    """
    for _ in range(2):  # the first call loads the kernels
        out = softmax_lse = None
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, softmax_lse, _ = flash_attn_func(
            q, k, v, causal=causal, split_size=split_size, return_attn_probs=True
        )
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before - out.nbytes - softmax_lse.nbytes
    assert out is not None
    assert softmax_lse is not None
    return (out, softmax_lse), taken


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("split_size", [512, 2048])
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_a_chunk_on_a_long_context(head_dim: int, split_size: int, causal: bool) -> None:
    """Without a limit, the parts of D128 take 1.1 GB at splits of 2048."""
    skip_unless_built(head_dim, "bf16")
    q, k, v = make_qkv((1, 1024, 32, head_dim), 131_072, 8)
    result, taken = run(q, k, v, causal, split_size)
    assert taken <= LIMIT + ALLOWED
    # The same sequence several times fills the GPU with row blocks: one CTA walks all splits.
    many = [t.expand(8, *t.shape[1:]) for t in (q, k, v)]
    plan = explain(flash_attn_func, *many, causal=causal, split_size=split_size)
    assert plan.path == "one-cta"
    together, taken = run(many[0], many[1], many[2], causal, split_size)
    assert taken <= ALLOWED
    for index in (0, 7):
        assert_same(result, (together[0][index : index + 1], together[1][index : index + 1]))


def test_parts_of_hopper_that_exceed_the_limit() -> None:
    """Parts of 1,024 splits: a tile of Hopper's takes 68 MB at least, one of the other 34."""
    skip_unless_built(128, "bf16")
    q, k, v = make_qkv((1, 256, 8, 128), 65_536)
    plan = explain(flash_attn_func, q, k, v, split_size=64)
    assert (plan.path, plan.family, plan.num_splits) == ("parts", "sm80", 1024)
    result, taken = run(q, k, v, False, 64)
    assert taken <= LIMIT + ALLOWED
    with device_override("path=one_cta"):
        alone, taken = run(q, k, v, False, 64)
    assert taken <= ALLOWED
    assert_same(result, alone)


@pytest.mark.parametrize("split_size", [64, 512])
def test_a_few_rows_on_a_long_context(split_size: int) -> None:
    """Many splits of few rows in a large batch: without a limit 0.5 GB at splits of 64."""
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv((16, 16, 16, 64), 32_768, 2)
    result, taken = run(q, k, v, True, split_size)
    assert taken <= LIMIT + ALLOWED
    # Fewer sequences need less scratch, and so may be kept otherwise.
    for index in (0, 15):
        own = [t[index : index + 1] for t in (q, k, v)]
        alone, _ = run(own[0], own[1], own[2], True, split_size)
        assert_same(alone, (result[0][index : index + 1], result[1][index : index + 1]))
