"""Caches of multi-head latent attention, through flash_attn_with_kvcache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import normal
from flash_attn_deterministic import explain, flash_attn_func, flash_attn_with_kvcache
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    UnsupportedError,
)

COLUMNS, VALUES = 576, 512


def cache_call(seqlen_q: int = 2, **given: Any) -> dict[str, Any]:
    q = normal(2, seqlen_q, 3, COLUMNS)
    cache = normal(2, 100, 1, COLUMNS)
    lengths = torch.tensor([100, 37], dtype=torch.int32)
    return {"q": q, "k_cache": cache, "v_cache": None, "cache_seqlens": lengths,
            "causal": True, "softmax_scale": 192**-0.5, **given}  # fmt: skip


def test_values_are_the_first_columns_of_keys() -> None:
    given = cache_call()
    out, softmax_lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert out.shape == (2, 2, 3, VALUES)
    for place, length in enumerate(given["cache_seqlens"].tolist()):
        keys = given["k_cache"][place, :length, 0].double()
        scores = torch.einsum("qhd,kd->hqk", given["q"][place].double(), keys) * 192**-0.5
        hidden = torch.ones(2, length, dtype=torch.bool).triu(length - 1)
        scores.masked_fill_(hidden, -torch.inf)
        exact = torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, :VALUES])
        torch.testing.assert_close(out[place].double(), exact, atol=0.02, rtol=0.02)
        lse = softmax_lse[place].double()
        torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_pages_and_single_queries_have_the_same_bits() -> None:
    given = cache_call()
    whole = flash_attn_with_kvcache(**given)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    room = torch.cat([given["k_cache"], torch.zeros(2, 12, 1, COLUMNS, dtype=torch.bfloat16)], 1)
    pages = torch.empty(14, 16, 1, COLUMNS, dtype=torch.bfloat16)
    pages[order] = room.view(14, 16, 1, COLUMNS)
    table = order.view(2, 7).int()
    paged = given | {"k_cache": pages, "block_table": table}
    assert bits_equal(flash_attn_with_kvcache(**paged), whole)
    for row in range(2):
        one = given | {"q": given["q"][:, row : row + 1]}
        one["cache_seqlens"] = given["cache_seqlens"] - 1 + row
        assert bits_equal(flash_attn_with_kvcache(**one), whole[:, row : row + 1])


def test_explain_takes_it() -> None:
    plan = explain(flash_attn_with_kvcache, **cache_call(), split_size=64)
    assert (plan.num_splits, plan.head_dim_v) == (2, VALUES)


@pytest.mark.parametrize("columns", [64, 512, 568])
def test_other_head_dims_have_values_of_their_own(columns: int) -> None:
    given = cache_call()
    given |= {name: given[name][..., :columns] for name in ("q", "k_cache")}
    with pytest.raises(ArgumentTypeError, match=r"v_cache: expected a torch\.Tensor, got NoneType"):
        flash_attn_with_kvcache(**given)


def test_values_of_their_own_are_refused() -> None:
    given = cache_call()
    given["v_cache"] = given["k_cache"][..., :VALUES]
    with pytest.raises(ArgumentError, match=r"q: expected .* 1 to 256, or 576 with v_cache=None"):
        flash_attn_with_kvcache(**given)


def test_fp8_is_refused() -> None:
    given = cache_call()
    given["k_cache"] = given["k_cache"].to(torch.float8_e4m3fn)
    with pytest.raises(
        DtypeError, match=r"k_cache: expected torch\.bfloat16, the dtype of q, with"
    ):
        flash_attn_with_kvcache(**given)


def test_nothing_is_appended() -> None:
    given = cache_call()
    new = given["k_cache"][:, :1]
    with pytest.raises(UnsupportedError, match="k: expected None with v_cache=None"):
        flash_attn_with_kvcache(**given, k=new, v=new[..., :VALUES])


def test_other_functions_keep_their_head_dims() -> None:
    given = cache_call()
    with pytest.raises(ArgumentError, match="q: expected a head_dim of 1 to 256, got 576"):
        flash_attn_func(given["q"], given["k_cache"], given["k_cache"])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_keeps_the_bits(backend: str) -> None:
    """Also of rows that are written in the same graph."""
    given = cache_call()

    def step(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> Any:
        cache[:, 36, 0] = q[:, 0, 0]
        return flash_attn_with_kvcache(q, cache, None, cache_seqlens=lengths)

    expected, found = (
        call(given["q"], given["k_cache"].clone(), given["cache_seqlens"])
        for call in (step, torch.compile(step, fullgraph=True, backend=backend))
    )
    assert bits_equal(found, expected)
