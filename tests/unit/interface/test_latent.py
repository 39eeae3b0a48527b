"""Caches of multi-head latent attention, through flash_attn_with_kvcache."""

from __future__ import annotations

from collections.abc import Callable
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

from tests.inductor import HAS_HEADERS

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


def with_columns(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {name: a[name][..., :count] for name in ("q", "k_cache")}


# What is changed of a call, and what is raised.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    **{f"{columns} columns": (with_columns(columns), ArgumentTypeError,
        r"v_cache: expected a torch\.Tensor, got NoneType") for columns in (64, 512, 568)},
    "values of their own": (lambda a: {"v_cache": a["k_cache"][..., :VALUES]},
        ArgumentError, r"q: expected .* 1 to 256, or 576 with v_cache=None"),
    "8 bits": (lambda a: {"k_cache": a["k_cache"].to(torch.float8_e4m3fn)},
        DtypeError, r"k_cache: expected torch\.bfloat16, the dtype of q, with"),
    "append": (lambda a: {"k": a["k_cache"][:, :1], "v": a["k_cache"][:, :1, :, :VALUES]},
        UnsupportedError, "k: expected None with v_cache=None"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_refused(change: Any, error: type[Exception], words: str) -> None:
    given = cache_call()
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**given | change(given))


def test_other_functions_keep_their_head_dims() -> None:
    given = cache_call()
    with pytest.raises(ArgumentError, match="q: expected a head_dim of 1 to 256, got 576"):
        flash_attn_func(given["q"], given["k_cache"], given["k_cache"])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=HAS_HEADERS)])
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
