"""v with another head dim than q and k, through the public functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from attention_cases import normal_like
from bits import bits_equal
from calls import Call, int32, kvcache_call, normal, paged_call, qkv_call, varlen_call
from flash_attn_deterministic import deterministic_mode, explain, flash_attn_func

PAIRS = pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(48, 32), (32, 48), (44, 20)], ids=["narrow", "wide", "unaligned"]
)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (3, 2), "causal": False},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, -0.2, 1.0])},
    "sink": {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 30.0])},
    "dropout": {"dropout_p": 0.3},
}
padded = torch.nn.functional.pad


def narrow(call: Call, head_dim_v: int) -> Call:
    """The call with other values, and the softmax_scale that padded keys would change."""
    given = dict(call.arguments)
    for name in {"v", "v_cache"} & set(given):
        given[name] = normal(*given[name].shape[:-1], head_dim_v, seed=7)
    given["softmax_scale"] = given["q"].shape[-1] ** -0.5
    return Call(call.function, given)


def wide(call: Call) -> Call:
    """The same call with padded tensors."""
    given = dict(call.arguments)
    names = {"q", "k", "v", "k_cache", "v_cache"} & set(given)
    most = max(given[name].shape[-1] for name in names)
    given |= {name: padded(given[name], (0, most - given[name].shape[-1])) for name in names}
    return Call(call.function, given)


@PAIRS
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("make", [qkv_call, varlen_call], ids=["dense", "packed"])
def test_results_and_gradients_are_those_of_padded_tensors(
    make: Any, feature: str, head_dim: int, head_dim_v: int
) -> None:
    call = narrow(make(head_dim), head_dim_v)
    results = []
    for one in (call, wide(call)):
        leaves = one.leaves()
        torch.manual_seed(5)
        with deterministic_mode(keep_residual=feature == "plain"):
            out, softmax_lse, _ = one(**leaves, **{**FEATURES[feature], **one.lse()}, split_size=64)
        dout = padded(normal_like(out[..., :head_dim_v]), (0, out.shape[-1] - head_dim_v))
        dlse = normal_like(softmax_lse)
        gradients = torch.autograd.grad((out, softmax_lse), list(leaves.values()), (dout, dlse))
        results.append((out, softmax_lse, *gradients))
    assert results[0][0].shape == (*call.arguments["q"].shape[:-1], head_dim_v)
    columns = (head_dim_v, None, head_dim, head_dim, head_dim_v)
    for found, expected, n in zip(*results, columns, strict=True):
        assert bits_equal(found, expected[..., :n])


@PAIRS
def test_caches_and_pages_are_those_of_padded_tensors(head_dim: int, head_dim_v: int) -> None:
    call = narrow(paged_call(head_dim), head_dim_v)
    assert bits_equal(call(), wide(call)()[..., :head_dim_v])
    call = narrow(kvcache_call(head_dim), head_dim_v)
    other = wide(call)
    assert bits_equal(call(), other()[..., :head_dim_v])
    for name in ("k_cache", "v_cache"):
        cache = call.arguments[name]
        assert bits_equal(cache, other.arguments[name][..., : cache.shape[-1]])


def test_vmap_and_plan() -> None:
    call = narrow(qkv_call(48), 32)
    stacked = [torch.stack([call.arguments[n]] * 2) for n in "qkv"]
    out = torch.func.vmap(functools.partial(flash_attn_func, causal=True))(*stacked)
    assert bits_equal(out[1], call())
    plan = explain(flash_attn_func, *(call.arguments[n] for n in "qkv"))
    assert plan.head_dim_v == 32


def test_rows_of_ranks_need_one_head_dim() -> None:
    q, v = normal(8, 2, 48), normal(8, 2, 32)
    starts = int32(0, 8)
    op = torch.ops.flash_attn_deterministic.varlen_bwd_sums
    lse = torch.zeros(2, 8)
    numbers = 8, 8, 0.0, 1.0, -1, 0, 0.0, True
    with pytest.raises(NotImplementedError, match="v: expected the head_dim of k, 48, where ranks"):
        op(v, q, q, v, v, lse, starts, starts, None, None, *numbers)
