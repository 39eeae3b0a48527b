"""Decode of multi-head latent attention: 576 columns, whose first 512 are the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_deterministic import explain
from flash_attn_deterministic.build_info import build_info
from flash_attn_deterministic.checks.tensors import LATENT
from flash_attn_deterministic.verify.contract.call import garbage
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    assert_same,
    flash_attn_with_kvcache,
    make_qkv,
    pairwise,
    scratch_of,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

COLUMNS, VALUES = LATENT
SCALE = 192**-0.5  # DeepSeek's
SCRATCH = 64 * 2**20
SMALL = "family=sm80,shared=101376"  # bytes: the least that a supported GPU has
SCHEDULES = ("", SMALL, "family=sm90")
# Around the edges of blocks and of splits.
LENGTHS = (2000, 0, 1, 63, 64, 65, 511, 512, 513, 1025)
DTYPE = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
SPLITS: dict[str, dict[str, int]] = {
    "splits-of-64": {"split_size": 64},
    "splits-of-512": {"split_size": 512},
    "one-split": {"split_size": 0},
    "default-splits": {},
}
# In which no row sees a key after its own.
CAUSAL: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (127, 0)},
    "softcap": {"softcap": 5.0, "causal": True},
    "alibi": {"alibi_slopes": True, "causal": True},
    "sink": {"learnable_sink": True, "causal": True},
}
OPTIONS = {
    **CAUSAL,
    "full": {},
    "wide-window": {"window_size": (300, 33)},
    "everything": {
        **{"window_size": (600, 20), "softcap": 4.0},
        **{"alibi_slopes": True, "learnable_sink": True},
    },
}


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def draw(
    dtype: str, lengths: tuple[int, ...], seqlen_q: int, heads: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, and keys of every sequence, as many as the longest has."""
    skip_unless_built(COLUMNS, dtype)
    shape = (len(lengths), seqlen_q, heads[0], COLUMNS)
    return make_qkv(shape, max(lengths), heads[1], dtype=DTYPES[dtype])[:2]


def stored(
    keys: torch.Tensor, lengths: tuple[int, ...], layout: str, seed: int = 0
) -> dict[str, Any]:
    """The arguments of a cache with the first keys of each sequence; NaN and Inf fill the rest."""
    batch, longest, *row = keys.shape
    pads, places, given = [0] * batch, list(range(batch)), {}
    if "pages" in layout:
        size = int(layout.removeprefix("pages-"))
        each = -(-longest // size) + 1
        order = torch.randperm(batch * each + 2, generator=torch.Generator().manual_seed(seed))
        table = order[: batch * each].view(batch, each).tolist()
        given["block_table"] = int32(table)
        cache = garbage((len(order), size, *row), keys)
        for pages, own, length in zip(table, keys, lengths, strict=True):
            whole = garbage((each * size, *row), keys)
            whole[:length] = own[:length]
            cache[pages] = whole.view(each, size, *row)
    else:
        if "leftpad" in layout:
            pads = [(3 + 61 * place) % 130 for place in places]
            given["cache_leftpad"] = int32(pads)
        if "places" in layout:
            places = [2 * place + 1 for place in reversed(places)]
            given["cache_batch_idx"] = int32(places)
        cache = garbage((max(places) + 1, longest + 140, *row), keys)
        for place, pad, own, length in zip(places, pads, keys, lengths, strict=True):
            cache[place, pad : pad + length] = own[:length]
    # Lengths count from the first row of a place.
    ends = [length + pad for length, pad in zip(lengths, pads, strict=True)]
    return {"k_cache": cache, "cache_seqlens": int32(ends), **given}


def attend(q: torch.Tensor, k_cache: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    """Returns out and softmax_lse."""
    return tuple(flash_attn_with_kvcache(**arguments(q, k_cache, **given)))


def arguments(q: torch.Tensor, k_cache: torch.Tensor, **given: Any) -> dict[str, Any]:
    return {
        **{"q": q, "k_cache": k_cache, "v_cache": None},
        **{"softmax_scale": SCALE, "return_softmax_lse": True, **given},
    }


def alone(
    q: torch.Tensor, keys: torch.Tensor, place: int, length: int, **given: Any
) -> tuple[torch.Tensor, ...]:
    """One sequence, in a cache of its length."""
    own = keys[place : place + 1, : max(length, 1)]
    return attend(q[place : place + 1], own, cache_seqlens=int32([length]), **given)


def with_tensors(options: dict[str, Any], nheads: int) -> dict[str, Any]:
    """Draws slopes and sinks of an option."""
    names = [name for name in ("alibi_slopes", "learnable_sink") if name in options]
    return {**options, **{name: torch.linspace(-0.5, 2, nheads, device="cuda") for name in names}}


@pairwise(
    dtype=("bf16", "fp16"),
    options=OPTIONS,
    split=SPLITS,
    seqlen_q=(1, 3, 17),
    heads=((1, 1), (16, 1), (33, 1), (128, 1), (34, 2)),
    layout=("cache", "leftpad", "places", "leftpad-places", "pages-16", "pages-48", "pages-64"),
)
def test_a_sequence_in_a_batch_has_the_bits_that_it_has_alone(
    dtype: str,
    options: dict[str, Any],
    split: dict[str, int],
    seqlen_q: int,
    heads: tuple[int, int],
    layout: str,
) -> None:
    """In every layout, in every kernel; NaN and Inf that lie around the keys change nothing."""
    q, keys = draw(dtype, LENGTHS, seqlen_q, heads)
    given = {**with_tensors(options, heads[0]), **split}
    cache = stored(keys, LENGTHS, layout)
    whole = attend(q, **cache, **given)
    assert whole[0].isfinite().all()
    for place, length in enumerate(LENGTHS):
        own = tuple(t[place : place + 1] for t in whole)
        assert_same(alone(q, keys, place, length, **given), own)
        if length == 0:
            assert not own[0].any()
            if "learnable_sink" not in options:
                assert own[1].isposinf().all()
    for schedule in SCHEDULES:
        with device_override(schedule):
            assert_same(attend(q, **cache, **given), whole)


@pairwise(
    dtype=("bf16", "fp16"),
    options=CAUSAL,
    split=SPLITS,
    seqlen_q=(2, 5, 16, 17, 100),
    heads=((1, 1), (16, 1), (34, 2)),
    layout=("cache", "pages-48"),
)
def test_queries_at_once_have_the_bits_of_one_at_a_time(
    dtype: str,
    options: dict[str, Any],
    split: dict[str, int],
    seqlen_q: int,
    heads: tuple[int, int],
    layout: str,
) -> None:
    lengths = (1100, 577, 40)  # of 100 queries the first 60 of the last sequence see no key
    q, keys = draw(dtype, lengths, seqlen_q, heads)
    given = {**stored(keys, lengths, layout), **with_tensors(options, heads[0]), **split}
    out, softmax_lse = attend(q, **given)
    ends = given["cache_seqlens"]
    for row in range(seqlen_q):
        given["cache_seqlens"] = (ends - (seqlen_q - 1 - row)).clamp(min=0)
        one = attend(q[:, row : row + 1], **given)
        assert_same(one, (out[:, row : row + 1], softmax_lse[..., row : row + 1]))


@pytest.mark.parametrize("seqlen_q", [1, 3, 17])
@pytest.mark.parametrize(
    ("nheads", "nheads_k"),
    [*((nheads, 1) for nheads in (3, 16, 17, 33, 64, 128)), (2, 2), (6, 2), (34, 2), (128, 2)],
)
@DTYPE
def test_heads_have_the_bits_that_they_have_alone(
    dtype: str, nheads: int, nheads_k: int, seqlen_q: int
) -> None:
    lengths = (700, 65)
    q, keys = draw(dtype, lengths, seqlen_q, (nheads, nheads_k))
    given = stored(keys, lengths, "pages-64") | {"causal": True, "split_size": 64}
    per_head = with_tensors(OPTIONS["everything"], nheads)
    out, softmax_lse = attend(q, **given, **per_head)
    cache, group = given.pop("k_cache"), nheads // nheads_k
    last = nheads - group
    for first, end in {
        *((0, 1), (group // 3, group // 2 + 1), (0, min(group, 16))),
        *((nheads - 1, nheads), (last + group // 3, last + group // 2 + 1)),
    }:
        own_cache = cache[:, :, first // group : first // group + 1]
        tensors = {
            name: value[first:end] if isinstance(value, torch.Tensor) else value
            for name, value in per_head.items()
        }
        some = attend(q[:, :, first:end], own_cache, **given, **tensors)
        assert_same(some, (out[:, :, first:end], softmax_lse[:, first:end]))


@pytest.mark.parametrize("layout", ["leftpad-places", "pages-64"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@DTYPE
def test_results_are_as_close_to_float64_as_roundings_explain(
    dtype: str, schedule: str, layout: str
) -> None:
    lengths = (700, 65)
    q, keys = draw(dtype, lengths, 3, (20, 1))
    with device_override(schedule):
        out, softmax_lse = attend(q, **stored(keys, lengths, layout), causal=True, split_size=128)
    for place, length in enumerate(lengths):
        own = keys[place, :length, 0].double()
        scores = torch.einsum("qhd,kd->hqk", q[place].double(), own) * SCALE
        hidden = torch.ones(3, length, dtype=torch.bool, device="cuda").triu(length - 2)
        scores.masked_fill_(hidden, -torch.inf)
        weights = scores.softmax(-1)
        exact = torch.einsum("hqk,kd->qhd", weights, own[:, :VALUES])
        # Weights and results are rounded once each.
        size = torch.einsum("hqk,kd->qhd", weights, own[:, :VALUES].abs())
        bound = torch.finfo(q.dtype).eps * size + 1e-5
        assert ((out[place].double() - exact).abs() <= bound).all()
        exact_lse = scores.logsumexp(-1)
        torch.testing.assert_close(softmax_lse[place].double(), exact_lse, atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("schedule", "seqlen_q", "nheads", "family", "block_m"),
    [
        pytest.param(SMALL, 1, 16, "sm80", 16, id="every-gpu"),
        pytest.param(SMALL, 100, 128, "sm80", 16, id="every-gpu-many-rows"),
        pytest.param("family=sm90", 1, 128, "sm90", 64, id="hopper"),
        pytest.param("family=sm90", 100, 16, "sm90", 64, id="hopper-queries"),
    ],
)
def test_which_kernel_runs(
    schedule: str, seqlen_q: int, nheads: int, family: str, block_m: int
) -> None:
    skip_unless_built(COLUMNS, "bf16")
    if family == "sm90":
        built = {i.family for i in build_info().instances if i.head_dim == COLUMNS}
        if torch.cuda.get_device_capability() != (9, 0) or family not in built:
            pytest.skip("no Hopper GPU, or no kernel for it")
    one = torch.empty(1, 1, 1, COLUMNS, device="cuda", dtype=torch.bfloat16)
    given = arguments(one.expand(8, seqlen_q, nheads, COLUMNS), one.expand(8, 4096, 1, COLUMNS))
    with device_override(schedule):
        plan = explain(flash_attn_with_kvcache, **given, causal=True)
    assert (plan.family, plan.path, plan.block_m) == (family, "few-rows", block_m)
    assert plan.head_dim_v == VALUES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_beyond_the_scratch_memory_take_several_launches(schedule: str) -> None:
    lengths = (1024, *range(900, 931))
    q, keys = draw("bf16", lengths, 1, (128, 1))
    given = stored(keys, lengths, "cache") | {"split_size": 64}
    with device_override(schedule):
        plan = explain(flash_attn_with_kvcache, **arguments(q, **given))
        result, taken = scratch_of(lambda: attend(q, **given))
    assert plan.launches > 1
    assert plan.scratch_bytes <= SCRATCH
    assert taken <= plan.scratch_bytes + 2**20  # what torch's allocator rounds up
    for place in (0, 15, 31):
        one = alone(q, keys, place, lengths[place], split_size=64)
        assert_same(one, tuple(t[place : place + 1] for t in result))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_graph_reads_keys_lengths_and_pages_as_they_are_then(schedule: str) -> None:
    lengths = (1000, 1, 517)
    q, keys = draw("bf16", lengths, 3, (34, 2))
    options: dict[str, Any] = {"causal": True, "split_size": 128}
    caches = [
        stored(keys, lengths, "pages-48"),
        stored(keys.flip(1), (64, 999, 0), "pages-48", seed=1),
    ]
    expected = [attend(q, **cache, **options) for cache in caches]
    static = {name: tensor.clone() for name, tensor in caches[0].items()}
    graph = torch.cuda.CUDAGraph()
    with device_override(schedule):
        attend(q, **static, **options)  # loads the kernels
        with torch.cuda.graph(graph):
            captured = attend(q, **static, **options)
    for place in (1, 0, 1):
        for name, tensor in static.items():
            tensor.copy_(caches[place][name])
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(captured, expected[place])
