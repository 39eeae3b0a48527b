"""Scratch memory of the forward has an upper limit, and no bits depend on how it is kept."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
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
        out, softmax_lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True)
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
    result, taken = run(q, k, v, causal=causal, split_size=split_size)
    assert taken <= LIMIT + ALLOWED
    # The same sequence several times fills the GPU with row blocks: one CTA walks all splits.
    many = [t.expand(8, *t.shape[1:]) for t in (q, k, v)]
    plan = explain(flash_attn_func, *many, causal=causal, split_size=split_size)
    assert plan.path == "one-cta"
    together, taken = run(*many, causal=causal, split_size=split_size)
    assert taken <= ALLOWED
    for index in (0, 7):
        assert_same(result, (together[0][index : index + 1], together[1][index : index + 1]))


# Calls one of whose row blocks takes more than the limit in parts of Hopper's rows. On Hopper parts
# of 64 rows run where that is faster than one CTA: seqlen_q, seqlen_k, nheads, window, split size.
BEYOND = {
    "few-row-blocks-long-splits": (64, 1_048_576, 8, -1, 512, "parts"),
    "short-splits": (256, 131_072, 16, -1, 64, "one-cta"),
    "window": (64, 1_048_576, 8, 4096, 512, "one-cta"),
}


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "nheads", "window", "split_size", "path"), BEYOND.values(), ids=BEYOND
)
def test_a_row_block_beyond_the_limit(
    seqlen_q: int, seqlen_k: int, nheads: int, window: int, split_size: int, path: str
) -> None:
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv((1, seqlen_q, nheads, 64), seqlen_k, 1)
    options: dict[str, Any] = {
        "window_size": (window, 0 if window >= 0 else -1),
        "split_size": split_size,
    }
    plan = explain(flash_attn_func, q, k, v, **options)
    if torch.cuda.get_device_capability() == (9, 0):
        assert (plan.path, plan.family == "sm80") == (path, path == "parts")
    results = []
    for forced in (None, "path=one_cta", "family=sm80,path=parts"):
        with contextlib.nullcontext() if forced is None else device_override(forced):
            result, taken = run(q, k, v, **options)
        assert taken <= LIMIT + ALLOWED
        results.append(result)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("split_size", [64, 512])
def test_a_few_rows_on_a_long_context(split_size: int) -> None:
    """Many splits of few rows in a large batch: without a limit 0.5 GB at splits of 64."""
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv((16, 16, 16, 64), 32_768, 2)
    result, taken = run(q, k, v, causal=True, split_size=split_size)
    assert taken <= LIMIT + ALLOWED
    # Fewer sequences need less scratch, and so may be kept otherwise.
    for index in (0, 15):
        own = [t[index : index + 1] for t in (q, k, v)]
        alone, _ = run(*own, causal=True, split_size=split_size)
        assert_same(alone, (result[0][index : index + 1], result[1][index : index + 1]))
