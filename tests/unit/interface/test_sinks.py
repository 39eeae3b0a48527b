"""Attention sinks, and the gradient of softmax_lse, through the public functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import normal_like
from bits import all_equal, bits_equal
from calls import CALLS, DIFFERENTIABLE, int32, normal, paged_call, qkv_call, varlen_call
from flash_attn_deterministic import deterministic_mode, interface
from flash_attn_deterministic.errors import UnsupportedError

# Any: the type checker can't match unpacked arguments.
flash_attn_func: Any = interface.flash_attn_func
flash_attn_varlen_func: Any = interface.flash_attn_varlen_func
flash_attn_with_kvcache: Any = interface.flash_attn_with_kvcache
INF = math.inf
SINKS = torch.tensor([0.5, -1.0, 2.0, 30.0])
NO_SINKS = torch.full((4,), -INF)
Tensors = tuple[torch.Tensor, ...]


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Tensors:
    """out and softmax_lse of a causal call: a softmax over the scores and the sink."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    scores = scores.masked_fill(torch.arange(k.shape[1]) > row, -INF)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 20], ids=["aligned", "padded"])
@pytest.mark.parametrize("keep_residual", [False, True], ids=["plain", "residual"])
def test_results_and_gradients_are_those_of_the_definition(
    keep_residual: bool, head_dim: int, dtype: torch.dtype
) -> None:
    call = qkv_call(head_dim)
    call.arguments["learnable_sink"] = SINKS.to(dtype)
    given = call.leaves()
    leaves = list(given.values())
    with deterministic_mode(keep_residual=keep_residual):
        out, softmax_lse, _ = call(**given, return_attn_probs=True)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    wanted = oracle(*doubles)
    torch.testing.assert_close(out.double(), wanted[0], rtol=0, atol=0.01)
    torch.testing.assert_close(softmax_lse.double(), wanted[1], rtol=0, atol=1e-5)
    random = normal_like(out), normal_like(softmax_lse)
    found = torch.autograd.grad((out, softmax_lse), leaves, random)
    expected = torch.autograd.grad(wanted, doubles, [x.double() for x in random])
    for one, other in zip(found, expected, strict=True):
        bound = 2 * torch.finfo(torch.bfloat16).eps * other.abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=bound)
    assert found[3].dtype == dtype


@pytest.mark.parametrize(
    "make", [qkv_call, varlen_call, paged_call, CALLS["flash_attn_with_kvcache"]]
)
def test_a_sink_of_minus_infinity_changes_no_bit(make: Any) -> None:
    call = make()
    returned = call.lse()
    without, with_sinks = call(**returned), make()(**returned, learnable_sink=NO_SINKS)
    assert all_equal(without, with_sinks)


def test_a_row_without_keys_ends_with_its_sink() -> None:
    q, k, v = (qkv_call().arguments[n] for n in "qkv")
    leaf = SINKS.clone().requires_grad_()
    out, softmax_lse, _ = flash_attn_func(
        q, k[:, :2], v[:, :2], causal=True, return_attn_probs=True, learnable_sink=leaf
    )
    assert not out[:, :3].any()
    torch.testing.assert_close(softmax_lse[:, :, :3], SINKS[:, None].expand(2, 4, 3))
    # Only softmax_lse depends on it.
    (dsink,) = torch.autograd.grad(softmax_lse[:, :, :3].sum(), leaf)
    torch.testing.assert_close(dsink, torch.full((4,), 6.0))
    _, softmax_lse, _ = flash_attn_func(
        q, k[:, :2], v[:, :2], causal=True, return_attn_probs=True, learnable_sink=NO_SINKS
    )
    assert (softmax_lse[:, :, :3] == INF).all()


def test_the_gradient_of_a_sink_adds_up_packed_sequences_in_order() -> None:
    q, k, v = normal(3, 70, 4, 32), normal(3, 70, 2, 32, seed=1), normal(3, 70, 2, 32, seed=2)
    dout = normal_like(q)

    def dsink(*rows: int) -> torch.Tensor:
        leaf = SINKS.clone().requires_grad_()
        given = [x[list(rows)] for x in (q, k, v, dout)]
        if len(rows) == 1:
            out = flash_attn_func(*given[:3], learnable_sink=leaf)
        else:
            given = [x.flatten(0, 1) for x in given]
            starts = int32(*range(0, 70 * len(rows) + 1, 70))
            out = flash_attn_varlen_func(*given[:3], starts, starts, 70, 70, learnable_sink=leaf)
        (found,) = torch.autograd.grad(out, leaf, given[3])
        return found

    alone = [dsink(row) for row in range(3)]
    assert bits_equal(dsink(0, 1, 2), alone[0] + alone[1] + alone[2])
    assert bits_equal(dsink(2, 0), alone[2] + alone[0])


def test_a_sink_alone_can_want_a_gradient() -> None:
    call = qkv_call()
    leaf = SINKS.clone().requires_grad_()
    out = call(learnable_sink=leaf)
    (found,) = torch.autograd.grad(out, leaf, normal_like(out))
    out = call(**call.leaves(), learnable_sink=leaf)
    assert bits_equal(found, torch.autograd.grad(out, leaf, normal_like(out))[0])
    with torch.no_grad():
        assert not call(learnable_sink=leaf).requires_grad
    cache: Any = CALLS["flash_attn_with_kvcache"]
    assert not cache()(learnable_sink=leaf).requires_grad


def test_vmap_takes_one_tensor_of_sinks() -> None:
    q = normal(3, 2, 5, 4, 32)

    def run(x: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn_func(x, x, x, learnable_sink=sinks)
        return out

    mapped = torch.vmap(run, in_dims=(0, None))(q, SINKS)
    assert bits_equal(mapped, torch.stack([run(x, SINKS) for x in q]))
    with pytest.raises(UnsupportedError, match="learnable_sink: expected one tensor for all"):
        torch.vmap(run)(q, SINKS.expand(3, 4))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_of_softmax_lse_alone(name: str) -> None:
    """That of q is the mean key under the softmax, of v 0."""
    call = CALLS[name](32)
    leaves = call.leaves()
    inputs = list(leaves.values())
    out, softmax_lse, _ = call(**leaves, return_attn_probs=True)
    dlse = normal_like(softmax_lse)
    found = torch.autograd.grad(softmax_lse, inputs, dlse, retain_graph=True)
    zeros = torch.autograd.grad((out, softmax_lse), inputs, (torch.zeros_like(out), dlse))
    assert all_equal(found, zeros)
    v = found[-1] if "v" in leaves else found[-1].unbind(-3)[-1]
    assert not v.any()
    assert found[0].any()
