"""Decode has the same bits on every path: few rows, scores first, upstream's body.

tests/gpu/decode/bits.py runs thousands of the same calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    BIT_CONFIGS,
    assert_contract,
    assert_same,
    each_config,
    is_built,
    make_qkv,
)
from tests.gpu.decode.bits import HEAD_DIMS, unequal_paths
from tests.gpu.drawn_calls import draw_call

pytestmark = pytest.mark.gpu

VARIABLE = "FLASH_ATTENTION_TEST_DEVICE"
PATHS = pytest.mark.parametrize("path", ["few_rows", "scores_first"])
CONFIGS = each_config(BIT_CONFIGS)


@pytest.mark.parametrize("seed", range(150))
def test_drawn_calls(seed: int) -> None:
    built = tuple(d for d in HEAD_DIMS if is_built(d, "bf16") and is_built(d, "fp16"))
    if not built:
        pytest.skip("this wheel holds no head dim with both dtypes")
    call = draw_call(seed, built, few=True)
    assert not unequal_paths(call), call.words


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "path"), [
    (1, 1, 4096, 32, 8, "scores-first"),
    (2, 5, 4096, 32, 8, "scores-first"),
    (64, 1, 4096, 32, 8, "few-rows"),
    (64, 16, 4096, 32, 8, "few-rows"),
    (1, 1, 200, 8, 8, "few-rows"),
], ids=["one-sequence", "queries", "batch", "queries-of-a-batch", "short"])  # fmt: skip
def test_the_path_follows_from_what_fills_the_gpu(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    nheads: int,
    nheads_k: int,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_FAMILY", "sm80")  # Hopper's: ../families/test_families.py
    one = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    q = one.expand(batch, seqlen_q, nheads, 64)
    k = one.expand(batch, seqlen_k, nheads_k, 64)
    plan = explain(flash_attn_func, q, k, k)
    assert plan.path == path
    assert plan.scratch_bytes <= 64 * 2**20


@PATHS
@pytest.mark.parametrize("group", [1, 4, 7, 16, 32])
@CONFIGS
def test_speculation(head_dim: int, dtype: str, group: int, path: str) -> None:
    """Several tokens at once have the bits that each has when it is the last one."""
    sizes: dict[str, Any] = {"features": ("causal",), "splits": (512,), "nheads": 2 * group}
    # Chunks of 1, 6 and 16 tokens, and of more; steps over a cache.
    lengths = (1, 64, 70, 500, 516, 522, 1490, 1495, 1500)
    with device_override(f"path={path}"):
        for row in ("chunk", "decode"):
            assert_contract(row, head_dim, dtype, lengths=lengths, seqlen=1500, **sizes)


@PATHS
@pytest.mark.parametrize("queries", [1, 5])
def test_the_order_of_kernels_around_a_call(
    queries: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a call read what was written before it, and end before the next.

    Keys and values are written right before each call and made NaN right after it, so that a kernel
    out of its turn would show; eagerly, and in a graph.
    """
    monkeypatch.setenv(VARIABLE, f"path={path}")
    q, k, v = make_qkv((2, queries, 16, 64), 3000, 4)
    other_k, other_v = k.flip(1).contiguous(), v.flip(1).contiguous()
    pairs = ((k, v), (other_k, other_v)) * 4
    expected = tuple(flash_attn_func(q, *pair, causal=True) for pair in pairs)
    keys, values = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))

    def run() -> tuple[torch.Tensor, ...]:
        results = []
        for from_k, from_v in pairs:
            keys.copy_(from_k)
            values.copy_(from_v)
            results.append(flash_attn_func(q, keys, values, causal=True))
            keys.fill_(float("nan"))
            values.fill_(float("nan"))
        return tuple(results)

    names = tuple(f"call {i}" for i in range(len(pairs)))
    assert_same(run(), expected, names)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(captured, expected, names)
