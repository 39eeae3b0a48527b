"""The largest score of each head, through the public functions; its values: verify's accuracy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bits import all_equal, bits_equal
from calls import CALLS, compiled, int32, normal, qkv_call, varlen_call
from flash_attn_deterministic import deterministic_mode, interface

# Any: the type checker can't match unpacked arguments.
flash_attn_func: Any = interface.flash_attn_func
flash_attn_varlen_func: Any = interface.flash_attn_varlen_func
INF = math.inf
NAMES = ("flash_attn_func", "flash_attn_varlen_func")
SINKS = torch.tensor([0.5, -1.0, 2.0, 300.0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["whole", "dropout"])
def test_nothing_else_changes_and_it_has_no_gradient(
    name: str, keep_residual: bool, dropout_p: float
) -> None:
    call = CALLS[name](32)

    def run(**options: Any) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        leaves = call.leaves()
        with deterministic_mode(keep_residual=keep_residual):
            found = call(**leaves, dropout_p=dropout_p, return_attn_probs=True, **options)
        ones = [torch.ones_like(x) for x in found[:2]]
        gradients = torch.autograd.grad(found[:2], list(leaves.values()), ones)
        return *gradients, *found

    *others, found = run(return_max_logits=True)
    assert not found.requires_grad
    assert found.dtype == torch.float32
    assert all_equal(others, run())
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
    tiny = torch.full_like(q, 2.0**-60)  # scores that become -0 in float32
    given = {"softmax_scale": 2.0**-100, "return_max_logits": True}
    found = flash_attn_func(tiny, -tiny[:, :, :2], tiny[:, :, :2], **given)[1]
    assert bits_equal(found, torch.zeros(4))
    q[0, 1, 2, 5] = math.nan
    found = flash_attn_func(q, q[:, :, :2].nan_to_num(), q[:, :, :2], return_max_logits=True)[1]
    assert found.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("make", [qkv_call, varlen_call])
def test_compiled_it_has_the_same_bits(make: Any) -> None:
    call = make()
    found = compiled(call.function)(**call.arguments, return_max_logits=True)
    expected = call(return_max_logits=True)
    assert all_equal(found, expected)


def test_vmap_returns_those_of_each_element() -> None:
    q = normal(3, 2, 5, 4, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flash_attn_func(x, x, x, return_max_logits=True)[1]
        return found

    mapped: Any = torch.vmap
    assert bits_equal(mapped(run)(q), torch.stack([run(x) for x in q]))
