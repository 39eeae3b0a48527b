"""The largest score of each head, through the public functions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import CALLS, Call, int32, normal, qkv_call, varlen_call
from flash_attn_deterministic import deterministic_mode, explain, interface
from flash_attn_deterministic.verify.exact import Definition

# Any: the type checker can't match unpacked arguments.
flash_attn_func: Any = interface.flash_attn_func
flash_attn_varlen_func: Any = interface.flash_attn_varlen_func
INF = math.inf
NAMES = ("flash_attn_func", "flash_attn_varlen_func")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.5, -1.0, 2.0, 300.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window-splits": {"window_size": (3, 1), "split_size": 64},
    "softcap": {"softcap": 0.5, "causal": True},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "sinks": {"learnable_sink": SINKS},
    "scale": {"softmax_scale": 3.0},
}


def exact(call: Call, options: dict[str, Any]) -> torch.Tensor:
    """The largest score of each head, by the definition, in float64."""
    given = {"causal": call.arguments.get("causal", False), **options}
    given = {n: x for n, x in given.items() if n not in ("split_size", "learnable_sink")}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = SLOPES[None]
    q, k, v = (call.arguments[n] for n in "qkv")
    parts = [(q, k, v)]
    if q.dim() == 3:
        starts = [call.arguments[n].tolist() for n in ("cu_seqlens_q", "cu_seqlens_k")]
        parts = [
            (q[None, a:b], k[None, c:d], v[None, c:d])
            for (a, b), (c, d) in zip(*map(itertools.pairwise, starts), strict=True)
        ]
    definition = Definition(**given)
    return torch.stack([definition.max_logits(*part[:2]) for part in parts]).amax(0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_largest_score_that_a_row_sees(name: str, options: dict[str, Any]) -> None:
    call = CALLS[name](32)
    out, found = call(**options, return_max_logits=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact(call, options), rtol=1e-6, atol=1e-6)
    assert bits_equal(out, call(**options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["whole", "dropout"])
def test_nothing_else_changes_and_it_has_no_gradient(
    name: str, keep_residual: bool, dropout_p: float
) -> None:
    call = CALLS[name](32)

    def run(**options: Any) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        leaves = [call.arguments[n].clone().requires_grad_() for n in "qkv"]
        given = dict(zip("qkv", leaves, strict=True))
        with deterministic_mode(keep_residual=keep_residual):
            found = call(**given, dropout_p=dropout_p, return_attn_probs=True, **options)
        gradients = torch.autograd.grad(found[:2], leaves, [torch.ones_like(x) for x in found[:2]])
        return *gradients, *found

    *others, found = run(return_max_logits=True)
    assert not found.requires_grad
    assert all(bits_equal(a, b) for a, b in zip(others, run(), strict=True))
    assert bits_equal(found, call(return_max_logits=True)[1])


def test_its_bits_are_those_of_the_sequences_alone() -> None:
    q, k = normal(3, 70, 4, 32), normal(3, 130, 2, 32, seed=1)
    alone = [flash_attn_func(a[None], b[None], b[None], return_max_logits=True)[1]
             for a, b in zip(q, k, strict=True)]  # fmt: skip
    expected = torch.stack(alone).amax(0)
    for split_size in (0, 64):
        given = {"return_max_logits": True, "split_size": split_size}
        assert bits_equal(flash_attn_func(q, k, k, **given)[1], expected)
        flat = [x.flatten(0, 1) for x in (q, k, k)]
        starts = int32(0, 70, 140, 210), int32(0, 130, 260, 390)
        assert bits_equal(flash_attn_varlen_func(*flat, *starts, 70, 130, **given)[1], expected)


def test_rows_without_keys_and_rows_of_no_sequence_do_not_count() -> None:
    q, k = normal(1, 5, 4, 32), normal(1, 2, 2, 32, seed=1)
    q[:, :3] = 100.0  # these rows see no key
    found = flash_attn_func(q, k, k, causal=True, return_max_logits=True)[1]
    seen = flash_attn_func(q[:, 3:], k, k, causal=True, return_max_logits=True)[1]
    assert bits_equal(found, seen)
    flat = q[0].flip(0), k[0], k[0]  # rows 2 to 4 belong to no sequence
    found = flash_attn_varlen_func(*flat, int32(0, 2), int32(0, 2), 2, 2, return_max_logits=True)[1]
    seen = flash_attn_func(q[:, 3:].flip(1), k, k, return_max_logits=True)[1]
    assert bits_equal(found, seen)


@pytest.mark.parametrize("rows", ["no-keys", "no-rows"])
def test_a_head_that_sees_no_key(rows: str) -> None:
    q, k = normal(2, 3, 4, 32), normal(2, 3, 2, 32)
    q, k = (q, k[:, :0]) if rows == "no-keys" else (q[:, :0], k)
    found = flash_attn_func(q, k, k, return_max_logits=True, learnable_sink=SINKS)[1]
    assert found.tolist() == [-INF] * 4


def test_a_zero_is_positive_and_nan_is_seen() -> None:
    q = normal(1, 3, 4, 32)
    found = flash_attn_func(q, -0.0 * q[:, :, :2], q[:, :, :2], return_max_logits=True)[1]
    assert bits_equal(found, torch.zeros(4))
    q[0, 1, 2, 5] = math.nan
    found = flash_attn_func(q, q[:, :, :2].nan_to_num(), q[:, :, :2], return_max_logits=True)[1]
    assert found.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("make", [qkv_call, varlen_call])
def test_compiled_it_has_the_same_bits(make: Any) -> None:
    torch._dynamo.reset()
    call = make()
    compiled: Any = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    found = compiled(**call.arguments, return_max_logits=True)
    expected = call(return_max_logits=True)
    assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_vmap_returns_those_of_each_element() -> None:
    q = normal(3, 2, 5, 4, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flash_attn_func(x, x, x, return_max_logits=True)[1]
        return found

    mapped: Any = torch.vmap
    assert bits_equal(mapped(run)(q), torch.stack([run(x) for x in q]))


def test_its_plan_is_that_of_the_call_without() -> None:
    call = qkv_call()
    with_max = explain(call.function, **call.arguments, return_max_logits=True)
    assert with_max == explain(call.function, **call.arguments)
