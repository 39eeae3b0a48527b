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
