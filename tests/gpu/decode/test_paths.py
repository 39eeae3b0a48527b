"""Decode has the same bits on every path: few rows, scores first, upstream's body.

tests/gpu/decode/bits.py runs thousands of the same calls, and compares wheels.
"""

from __future__ import annotations

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func, flash_attn_with_kvcache

from tests.gpu.attention import (
    BIT_CONFIGS,
    DTYPES,
    assert_same,
    assert_same_in_a_graph,
    assert_same_on_streams,
    each_config,
    is_built,
    make_qkv,
)
from tests.gpu.decode.bits import unequal_paths
from tests.gpu.decode.calls import HEAD_DIMS, draw
from tests.gpu.gradients import int32

pytestmark = pytest.mark.gpu

VARIABLE = "FLASH_ATTENTION_TEST_DEVICE"
PATHS = pytest.mark.parametrize("path", ["few_rows", "scores_first"])
CONFIGS = each_config(BIT_CONFIGS)

Outputs = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("seed", range(150))
def test_drawn_calls(seed: int) -> None:
    built = tuple(d for d in HEAD_DIMS if is_built(d, "bf16") and is_built(d, "fp16"))
    if not built:
        pytest.skip("this wheel holds no head dim with both dtypes")
    call = draw(seed, built)
    assert not unequal_paths(call), call.words


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "path"),
    [
        (1, 1, 4096, 32, 8, "scores-first"),
        (2, 5, 4096, 32, 8, "scores-first"),
        (64, 1, 4096, 32, 8, "few-rows"),
        (64, 16, 4096, 32, 8, "few-rows"),
        (1, 1, 200, 8, 8, "few-rows"),
    ],
    ids=["one-sequence", "queries", "batch", "queries-of-a-batch", "short"],
)
def test_the_path_follows_from_what_fills_the_gpu(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    nheads: int,
    nheads_k: int,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_FAMILY", "sm80")  # Hopper's: ../families/test_parts.py
    one = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    q = one.expand(batch, seqlen_q, nheads, 64)
    k = one.expand(batch, seqlen_k, nheads_k, 64)
    plan = explain(flash_attn_func, q, k, k)
    assert plan.path == path
    assert plan.scratch_bytes <= 64 * 2**20


@PATHS
@pytest.mark.parametrize("group", [1, 4, 7, 16, 32])
@CONFIGS
def test_speculation(
    head_dim: int, dtype: str, group: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens at once have the bits that each has when it is the last one."""
    monkeypatch.setenv(VARIABLE, f"path={path}")
    tokens, length = 6, 1500
    q, k, v = make_qkv((2, tokens, 2 * group, head_dim), length, 2, dtype=DTYPES[dtype])

    def run(q: torch.Tensor, used: int) -> Outputs:
        out, softmax_lse = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=int32([used, used]),
            causal=True,
            split_size=512,
            return_softmax_lse=True,
        )
        return out, softmax_lse

    out, softmax_lse = run(q, length)
    for i in range(tokens):
        one = run(q[:, i : i + 1].contiguous(), length - tokens + 1 + i)
        assert_same(one, (out[:, i : i + 1], softmax_lse[:, :, i : i + 1]))


@pytest.mark.parametrize("seqlen_q", [1, 3])
@CONFIGS
def test_replay_and_streams(
    head_dim: int, dtype: str, seqlen_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of arrivals are cleared inside each call, and belong to it alone."""
    monkeypatch.setenv(VARIABLE, "path=scores_first")
    q, k, v = make_qkv((3, seqlen_q, 8, head_dim), 3000, 2, dtype=DTYPES[dtype])

    def run() -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True, split_size=256)

    expected = run()
    assert_same_in_a_graph(run, expected, replays=20)
    assert_same_on_streams(run, expected)


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


@PATHS
def test_several_launches(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More scratch than one launch may take: a call is cut into launches."""
    batch, length = 96, 16_384
    q, k, v = make_qkv((1, 2, 16, 64), length, 4)
    qs, ks, vs = (t.expand(batch, *t.shape[1:]) for t in (q, k, v))
    monkeypatch.setenv(VARIABLE, f"path={path}")
    plan = explain(flash_attn_func, qs, ks, vs, split_size=64)
    assert plan.path == path.replace("_", "-")
    assert plan.launches > 1
    expected = flash_attn_func(q, k, v, split_size=64)
    out = flash_attn_func(qs, ks, vs, split_size=64)
    for index in (0, 1, batch // 2, batch - 1):
        assert_same((out[index : index + 1],), (expected,), ("out",))
