"""Caches in float8_e4m3fn, and their scales, through the public functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bits import all_equal, bits_equal
from calls import NHEADS, NHEADS_K, Call, kvcache_call, normal, paged_call, qkv_call
from flash_attn_deterministic import explain
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    UnsupportedError,
)

FP8 = torch.float8_e4m3fn
CACHES = pytest.mark.parametrize("make", [kvcache_call, paged_call], ids=["cache", "packed-pages"])
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "window": {"window_size": (3, 2), "causal": False},
    "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, -0.2, 1.0])},
    "sink": {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 30.0])}, "splits": {"split_size": 64},
}  # fmt: skip


def names(call: Call) -> tuple[str, str]:
    return ("k_cache", "v_cache") if "k_cache" in call.arguments else ("k", "v")


def with_cache(make: Any, dtype: torch.dtype, head_dim: int = 40, head_dim_v: int = 24) -> Call:
    """A call that appends nothing, with a cache of these numbers in 8 bits."""
    call = make(head_dim)
    given = {n: x for n, x in call.arguments.items() if not n.startswith("rotary")}
    k, v = names(call)
    if k == "k_cache":
        given |= {"k": None, "v": None}
    given["q"] = given["q"].to(dtype)
    for seed, (name, columns) in enumerate(((k, head_dim), (v, head_dim_v))):
        given[name] = normal(*given[name].shape[:-1], columns, seed=seed).to(FP8)
    return Call(call.function, given)


def batch_of(call: Call) -> int:
    starts = call.arguments.get("cu_seqlens_q")
    return int(call.arguments["q"].shape[0] if starts is None else len(starts) - 1)


def converted(call: Call) -> Call:
    """The same call on the cache in q's dtype."""
    given = dict(call.arguments)
    given |= {name: given[name].to(given["q"].dtype) for name in names(call)}
    return Call(call.function, given)


@CACHES
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dims", [(40, 24), (36, 36)], ids=["two", "unaligned"])
def test_bits_are_those_of_the_converted_cache(
    make: Any, feature: str, dtype: torch.dtype, head_dims: tuple[int, int]
) -> None:
    call = with_cache(make, dtype, *head_dims)
    options = {**FEATURES[feature], **call.lse()}
    assert all_equal(call(**options), converted(call)(**options))


@CACHES
@pytest.mark.parametrize("shape", ["number", "scalar", "heads", "both", "expanded"])
def test_scales_multiply_q_and_out(make: Any, shape: str) -> None:
    call = with_cache(make, torch.bfloat16)
    batch = batch_of(call)
    each = torch.rand(2, batch, NHEADS_K, generator=torch.Generator().manual_seed(0)) + 0.5
    each = {
        "number": torch.full_like(each, 0.37),
        "scalar": each[:, :1, :1].expand_as(each),
        "heads": each[:, :1].expand_as(each),
        "both": each,
        "expanded": each[:, :1, :1].expand_as(each),
    }[shape]
    given: Any = {
        "number": (0.37, 0.37),
        "scalar": each[:, 0, 0],
        "heads": each[:, 0],
        "both": each,
        "expanded": each,
    }[shape]
    starts = call.arguments.get("cu_seqlens_q")

    def times(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scales = scales.repeat_interleave(NHEADS // NHEADS_K, -1)
        if starts is None:
            return (rows.float() * scales[:, None, :, None]).to(rows.dtype)
        lengths = starts.diff().tolist()
        rest = rows.shape[0] - sum(lengths)
        scales = torch.cat([s.expand(n, -1) for s, n in zip(scales, lengths, strict=True)])
        scales = torch.cat([scales, scales[:1].expand(rest, -1)])
        return (rows.float() * scales[..., None]).to(rows.dtype)

    found = call(k_descale=given[0], v_descale=given[1])
    expected = times(converted(call)(q=times(call.arguments["q"], each[0])), each[1])
    assert bits_equal(found, expected)


@CACHES
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_numbers_are_float32_whatever_the_default_dtype(make: Any, default: torch.dtype) -> None:
    call = with_cache(make, torch.bfloat16)
    expected = call(k_descale=torch.tensor(0.37), v_descale=torch.tensor(0.37))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = call(k_descale=0.37, v_descale=0.37)
    finally:
        torch.set_default_dtype(before)
    assert bits_equal(found, expected)


@CACHES
@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_scales_get_no_gradient(make: Any, name: str) -> None:
    call = with_cache(make, torch.bfloat16)
    assert not call(**{name: torch.ones(NHEADS_K, requires_grad=True)}).requires_grad


def test_autocast_leaves_pages_and_their_scales() -> None:
    call = with_cache(paged_call, torch.bfloat16)
    scales = {"k_descale": 0.37, "v_descale": torch.tensor([1.5, 0.3])}
    expected = call(**scales)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(q=call.arguments["q"].float(), **scales)
    assert bits_equal(found, expected)


def test_explain_takes_caches_in_8_bits_and_checks_scales() -> None:
    call = with_cache(kvcache_call, torch.bfloat16)
    assert explain(call.function, **call.arguments, k_descale=2.0) == explain(
        call.function, **converted(call).arguments
    )
    with pytest.raises(ArgumentError, match="v_descale: expected shape"):
        explain(call.function, **call.arguments, v_descale=torch.ones(7))


WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "other dtypes": ({"v_cache": torch.bfloat16}, DtypeError, "v_cache: expected torch.float8"),
    "values alone": ({"k_cache": torch.bfloat16}, DtypeError, "v_cache: expected torch.bfloat16"),
    "e5m2": ({"k_cache": torch.float8_e5m2}, DtypeError, "k_cache: expected torch.bfloat16"),
    "append": ({"k": (2, 1, NHEADS_K, 40), "v": (2, 1, NHEADS_K, 24)},
        UnsupportedError, "k: expected None with a cache in torch.float8_e4m3fn"),
    "shape": ({"k_descale": torch.ones(2, 3)}, ArgumentError,
        "k_descale: expected shape (batch, nheads_k) = (2, 2), (nheads_k,) or ()"),
    "scale's dtype": ({"v_descale": torch.ones(2, dtype=torch.float64)},
        DtypeError, "v_descale: expected dtype torch.float32, got torch.float64"),
    "scale's type": ({"v_descale": "1"}, ArgumentTypeError, "v_descale: expected a float, a torch"),
    "too large": ({"k_descale": 1e39}, ArgumentError, "k_descale: expected a finite number of"),
    "an int too large": ({"v_descale": 10**400}, ArgumentError, "v_descale: expected a finite"),
    "no number": ({"k_descale": float("nan")}, ArgumentError, "k_descale: expected a finite"),
}  # fmt: skip


# Of other calls.
OTHERS: dict[str, tuple[Call, dict[str, Any], Any, str]] = {
    "dropout": (with_cache(paged_call, torch.bfloat16), {"dropout_p": 0.1},
        UnsupportedError, "dropout_p: expected 0.0 with keys"),
    "scale of another cache": (converted(with_cache(kvcache_call, torch.bfloat16)),
        {"k_descale": 0.5}, ArgumentError, "k_descale: expected None with keys and values in"),
    "no cache": (qkv_call(), {"k": FP8, "v": FP8}, DtypeError, "k: expected torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*WRONG, *OTHERS])
def test_wrong_arguments_are_named(case: str) -> None:
    kept = with_cache(kvcache_call, torch.bfloat16)
    call, changes, error, words = OTHERS[case] if case in OTHERS else (kept, *WRONG[case])
    given = {
        n: call.arguments[n].to(x)
        if isinstance(x, torch.dtype)
        else (normal(*x) if isinstance(x, tuple) else x)
        for n, x in changes.items()
    }
    with pytest.raises(error, match=re.escape(words)):
        call(**given)
