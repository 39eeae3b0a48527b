"""Hopper's forward with a part for each split has the bits of its walk over all splits.

So have the kernels for every GPU. Here are the edges of splits and tiles, caches and pages, and
what only parts have: several launches, with a counter in each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_deterministic import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

from tests.gpu.attention import (
    DTYPES,
    assert_same,
    each_config,
    make_qkv,
    pairwise,
    skip_unless_built,
)
from tests.gpu.gradients import int32

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

VARIABLE = "FLASH_ATTENTION_TEST_DEVICE"
SCHEDULES = ("family=sm80,path=one_cta", "family=sm90,path=one_cta", "family=sm90,path=parts")
CONFIG = {
    "d8": (8, "bf16"),
    "d32": (32, "bf16"),
    "d40": (40, "fp16"),
    "d64": (64, "bf16"),
    "d96": (96, "bf16"),
    "d112": (112, "bf16"),
    "d128": (128, "fp16"),
    "d160": (160, "fp16"),
    "d192": (192, "bf16"),
    "d256": (256, "fp16"),
}
CONFIGS = each_config(tuple(CONFIG.values()))
MASK: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 20)},
    "narrow": {"window_size": (0, 0)},
    "softcap": {"softcap": 20.0, "causal": True},
}
HEADS = {"g1": (2, 2), "g4": (8, 2), "g8": (8, 1), "g3": (6, 2)}  # nheads, nheads_k
AXES: dict[str, Any] = {"config": CONFIG, "heads": HEADS, "options": MASK}
SPLIT = 256

Outputs = tuple[torch.Tensor, torch.Tensor]


def assert_schedules_agree(
    monkeypatch: pytest.MonkeyPatch, function: Any, *tensors: Any, **options: Any
) -> Outputs:
    """Runs a call in each schedule, and returns its results."""
    lse = "return_softmax_lse" if function is flash_attn_with_kvcache else "return_attn_probs"
    results: list[Outputs] = []
    for schedule in SCHEDULES:
        monkeypatch.setenv(VARIABLE, schedule)
        plan = explain(function, *tensors, **options)
        family, path = (word.split("=")[1] for word in schedule.split(","))
        assert (plan.family, plan.path) == (family, path.replace("_", "-"))
        out, softmax_lse, *_ = function(*tensors, **options, **{lse: True})
        assert not out.isnan().any()
        results.append((out, softmax_lse))
    for other in results[1:]:
        assert_same(other, results[0])
    return results[0]


@pairwise(**AXES, seqlen_k=(257, 511, 512, 513, 575, 577, 1100))
def test_edges_of_splits(
    config: tuple[int, str],
    heads: tuple[int, int],
    options: dict[str, Any],
    seqlen_k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (head_dim, dtype), (nheads, nheads_k) = config, heads
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((2, 200, nheads, head_dim), seqlen_k, nheads_k, dtype=DTYPES[dtype])
    assert_schedules_agree(monkeypatch, flash_attn_func, q, k, v, split_size=SPLIT, **options)


@pairwise(**AXES, seqlen_q=(1, 2, 16, 17, 63, 65, 127, 129, 193, 385, 900))
def test_edges_of_tiles(
    config: tuple[int, str],
    heads: tuple[int, int],
    options: dict[str, Any],
    seqlen_q: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 900 queries on 700 keys some rows see none."""
    (head_dim, dtype), (nheads, nheads_k) = config, heads
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((2, seqlen_q, nheads, head_dim), 700, nheads_k, dtype=DTYPES[dtype])
    assert_schedules_agree(monkeypatch, flash_attn_func, q, k, v, split_size=SPLIT, **options)


@pairwise(**AXES)
def test_ragged(
    config: tuple[int, str],
    heads: tuple[int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences without queries or keys, and such as end at, before and behind a split's end."""
    (head_dim, dtype), (nheads, nheads_k) = config, heads
    skip_unless_built(head_dim, dtype)
    lengths_q = [300, 0, 1, 65, 640, 5, 40, 129]
    lengths_k = [300, 17, 900, 0, 129, 256, 257, 511]
    q, _, _ = make_qkv((1, sum(lengths_q), nheads, head_dim), dtype=DTYPES[dtype])
    _, k, v = make_qkv((1, sum(lengths_k), nheads_k, head_dim), dtype=DTYPES[dtype], seed=1)
    starts_q = int32([sum(lengths_q[:i]) for i in range(len(lengths_q) + 1)])
    starts_k = int32([sum(lengths_k[:i]) for i in range(len(lengths_k) + 1)])
    assert_schedules_agree(
        monkeypatch,
        flash_attn_varlen_func,
        *(q[0], k[0], v[0], starts_q, starts_k, max(lengths_q), max(lengths_k)),
        split_size=SPLIT,
        **options,
    )


@pairwise(**AXES, seqlen_q=(3, 16, 100), page_size=(0, 16, 64, 256))
def test_cache_with_nan_behind_its_ends(
    config: tuple[int, str],
    heads: tuple[int, int],
    options: dict[str, Any],
    seqlen_q: int,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (head_dim, dtype), (nheads, nheads_k) = config, heads
    skip_unless_built(head_dim, dtype)
    used = [1000, 63, 0, 256, 257, 512]
    page, batch = page_size or 1024, len(used)
    q, _, _ = make_qkv((batch, seqlen_q, nheads, head_dim), dtype=DTYPES[dtype])
    pages = batch * 1024 // page
    _, k, v = make_qkv((pages, 1, nheads, head_dim), page, nheads_k, dtype=DTYPES[dtype], seed=1)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(2)).view(batch, -1)
    for sequence, length in enumerate(used):
        for place, which in enumerate(table[sequence].tolist()):
            first = max(0, length - place * page)
            k[which, first:] = v[which, first:] = float("nan")
    where = (
        {"block_table": table.to("cuda", torch.int32)}
        if page_size > 0
        else {"cache_batch_idx": int32(table[:, 0].tolist())}
    )
    assert_schedules_agree(
        monkeypatch,
        flash_attn_with_kvcache,
        *(q, k, v),
        cache_seqlens=int32(used),
        split_size=SPLIT,
        **where,
        **options,
    )


@CONFIGS
def test_negative_zeros(head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product of a chain adds to nothing in one family, and to 0 in the other."""
    skip_unless_built(head_dim, dtype)
    q, k, _ = make_qkv((2, 200, 8, head_dim), 700, 2, dtype=DTYPES[dtype])
    v = -torch.zeros_like(k)
    assert_schedules_agree(monkeypatch, flash_attn_func, q, k, v, causal=True, split_size=SPLIT)


@pytest.mark.parametrize("sms", [1, 7, 132, 10_000])
@CONFIGS
def test_however_many_take_parts(
    head_dim: int, dtype: str, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CTA takes all parts, or each its own."""
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((2, 200, 8, head_dim), 1100, 2, dtype=DTYPES[dtype])
    expected = assert_schedules_agree(
        monkeypatch, flash_attn_func, q, k, v, causal=True, split_size=SPLIT
    )
    monkeypatch.setenv(VARIABLE, f"family=sm90,path=parts,sms={sms}")
    out, softmax_lse, _ = flash_attn_func(
        q, k, v, causal=True, split_size=SPLIT, return_attn_probs=True
    )
    assert_same((out, softmax_lse), expected)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "nheads", "head_dim", "family", "path"),
    [
        (1, 512, 32_768, 32, 64, "sm90", "parts"),
        (1, 512, 32_768, 32, 128, "sm90", "one-cta"),
        (1, 128, 32_768, 32, 128, "sm90", "parts"),
        (1, 4096, 4096, 32, 128, "sm90", "one-cta"),
        (4, 5, 4096, 32, 128, "sm90", "parts"),
        (4, 1, 4096, 32, 256, "sm90", "parts"),
        (8, 16, 777, 32, 128, "sm90", "one-cta"),
        (8, 8, 777, 56, 128, "sm90", "one-cta"),
        (1, 1, 4096, 32, 128, "sm80", "scores-first"),
        (1, 16, 4096, 32, 128, "sm90", "parts"),
    ],
    ids=[
        "idle-sms",
        "few-idle-sms",
        "short-chunk",
        "prefill",
        "5-queries",
        "head-dim-256",
        "one-split-of-64-rows",
        "one-split-of-56-rows",
        "one-query",
        "16-queries-of-one",
    ],
)
def test_parts_are_left_where_they_pay(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    nheads: int,
    head_dim: int,
    family: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SMs would idle, or few queries have many rows; `bench --study paths` times the choice."""
    skip_unless_built(head_dim, "bf16")
    monkeypatch.setenv(VARIABLE, "sms=132")
    one = torch.empty(1, 1, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    q = one.expand(batch, seqlen_q, nheads, head_dim)
    k = one.expand(batch, seqlen_k, 8, head_dim)
    plan = explain(flash_attn_func, q, k, k, causal=True)
    assert (plan.family, plan.path) == (family, path)
