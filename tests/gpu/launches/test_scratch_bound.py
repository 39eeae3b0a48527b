"""Scratch memory of the forward: what explain() says, with an upper limit; no bits depend on it."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import DTYPES, assert_same, make_qkv, scratch_of, skip_unless_built

pytestmark = pytest.mark.gpu

LIMIT = 64 * 2**20
COUNTER = 4  # bytes, of the row blocks that CTAs of the sm90 family have taken
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
    assert (plan.scratch_bytes <= COUNTER) == (plan.path == "one-cta")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k", "paths"), [
    pytest.param(4, 4096, 4096, ("one-cta",), id="prefill"),
    pytest.param(1, 1, 32_768, ("few-rows", "scores-first", "parts"), id="decode"),
    pytest.param(2, 1, 131_072, ("few-rows", "scores-first", "parts"), id="long-decode"),
    pytest.param(2, 512, 8192, ("parts",), id="chunk"),
])  # fmt: skip
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16"), (256, "bf16")])
def test_scratch_is_what_explain_says(
    head_dim: int,
    dtype: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    paths: tuple[str, ...],
    causal: bool,
) -> None:
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((batch, seqlen_q, 8, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    plan = explain(flash_attn_func, q, k, v, causal=causal)
    assert plan.path in paths
    assert (plan.scratch_bytes <= COUNTER) == (plan.path == "one-cta")
    _, scratch = run(q, k, v, causal=causal)
    assert plan.scratch_bytes <= scratch <= plan.scratch_bytes + ALLOWED


@pytest.mark.parametrize("seqlen_q", [1, 16, 17], ids=lambda n: f"{n}-queries")
def test_explain_knows_what_dropout_does(seqlen_q: int) -> None:
    """The kernel for a few rows has none, nor are groups turned into rows."""
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv((1, seqlen_q, 8, 64), 4096, 2)
    options: dict[str, Any] = {"dropout_p": 0.1, "split_size": 512}
    plan = explain(flash_attn_func, q, k, v, **options)
    _, scratch = scratch_of(lambda: (cast(torch.Tensor, flash_attn_func(q, k, v, **options)),))
    assert plan.scratch_bytes <= scratch < plan.scratch_bytes + 2**16
    assert plan.block_m == 64


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[tuple[torch.Tensor, ...], int]:
    """out and softmax_lse of a call, and the bytes that it takes besides them."""
    return scratch_of(lambda: flash_attn_func(q, k, v, **options, return_attn_probs=True)[:2])


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
