"""keep_residual: the forward keeps the rounding error of out, and the backward adds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import softmax_attention
from bits import bits_equal
from calls import CALLS, normal
from flash_attn_deterministic import (
    checkpoint_contexts,
    deterministic_mode,
    explain,
    flash_attn_func,
    flash_attn_qkvpacked_func,
)
from flash_attn_deterministic.errors import UnsupportedError
from flash_attn_deterministic.integrations import low_level
from flash_attn_deterministic.reference import attention, restored, with_residual
from flash_attn_deterministic.verify.contract import CHECKS, Attention, run_check, size_of
from torch.utils.checkpoint import checkpoint

OPS = torch.ops.flash_attn_deterministic
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
KEPT = deterministic_mode(split_size=64, keep_residual=True)
PLAIN = deterministic_mode(split_size=64, keep_residual=False)
Tensors = tuple[torch.Tensor, ...]


def _run(attend: Callable[..., torch.Tensor], inputs: Tensors, dout: torch.Tensor) -> Tensors:
    """Returns out and the gradients of inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attn_func(q, k, v, causal=True)


def _inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensors, torch.Tensor]:
    q, dout = (normal(2, 70, 4, 32, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (normal(2, 150, 2, 32, dtype=dtype, seed=seed) for seed in (2, 3))
    return (q, k, v), dout


def _differ(left: Tensors, right: Tensors) -> list[str]:
    pairs = zip(("out", "dq", "dk", "dv"), left, right, strict=True)
    return [name for name, a, b in pairs if not bits_equal(a, b)]


@DTYPES
def test_out_and_dv_keep_their_bits(dtype: torch.dtype) -> None:
    inputs, dout = _inputs(dtype)
    with PLAIN:
        plain = _run(_causal, inputs, dout)
    with KEPT:
        kept = _run(_causal, inputs, dout)
    assert _differ(plain, kept) == ["dq", "dk"]


@DTYPES
def test_residual_makes_out_more_exact(dtype: torch.dtype) -> None:
    (q, k, v), _ = _inputs(dtype)
    out, softmax_lse, residual = with_residual(attention, q, k, v, split_size=64)
    expected = attention(q, k, v, split_size=64)
    assert bits_equal(out, expected[0])
    assert bits_equal(softmax_lse, expected[1])
    assert (residual.shape, residual.dtype) == (out.shape, torch.bfloat16)
    exact = softmax_attention(q.double(), k.double(), v.double(), 32**-0.5)[0]
    half_a_step = torch.finfo(dtype).eps * out.double().abs() / 2 + 2**-25  # fp16 has denormals
    assert bool((residual.abs() <= half_a_step).all())
    assert (restored(out, residual) - exact).norm() < (out - exact).norm()


def test_gradients_keep_their_row_of_the_contract() -> None:
    """Batch, packing, groups of heads."""
    size = dataclasses.replace(size_of("cpu", quick=True), configs=((32, "bf16"),))
    check = next(check for check in CHECKS if check.id == "backward")
    with KEPT:
        outcome = run_check(check, size, Attention.installed())
    assert outcome.cases
    assert outcome.counter_example is None


def test_gradient_of_one_tensor_is_that_of_its_parts() -> None:
    qkv, dout = normal(2, 70, 3, 4, 32), _inputs()[1]
    with KEPT:
        one = _run(lambda qkv: flash_attn_qkvpacked_func(qkv, causal=True), (qkv,), dout)
        parts = _run(_causal, qkv.unbind(2), dout)
    assert bits_equal(one[1], torch.stack(parts[1:], 2))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
def test_residual_of_float64_is_zero(dropout_p: float) -> None:
    q, k, v = (normal(1, 9, 2, 32, dtype=torch.float64, seed=seed) for seed in range(3))
    random: dict[str, Any] = {"dropout_p": dropout_p, "rng_state": torch.tensor([5, 7])}
    *_, residual = with_residual(attention, q, k, v, causal=True, split_size=64, **random)
    assert not residual.any()


def test_residual_of_rows_without_keys_is_zero() -> None:
    q, k = normal(1, 5, 2, 32), normal(1, 0, 2, 32)
    out, _, residual = OPS.fwd_with_residual(
        q, k, k, None, None, 0.0, 0.2, -1, -1, 0.0, 0, True, True
    )
    assert not out.any()
    assert not residual.any()


# --- Where it is kept ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CALLS if "kvcache" not in name])
def test_explain_shows_it(name: str) -> None:
    arguments = dict(CALLS[name](32).arguments)
    with KEPT:
        assert explain(name, **arguments).residual_bytes == 0  # nothing wants a gradient
        tensor = next(key for key in ("q", "qkv") if key in arguments)
        arguments[tensor] = arguments[tensor].clone().requires_grad_()
        out = CALLS[name](32).function(**arguments)
        assert explain(name, **arguments).residual_bytes == 2 * out.numel()
        with torch.no_grad():
            assert explain(name, **arguments).residual_bytes == 0
    assert explain(name, **arguments).residual_bytes == 0


def test_backward_does_not_depend_on_the_mode() -> None:
    inputs, dout = _inputs()
    with KEPT:
        expected = _run(_causal, inputs, dout)
        leaves = [x.requires_grad_() for x in inputs]
        out = _causal(*leaves)
    with PLAIN:
        gradients = torch.autograd.grad(out, leaves, dout)
    assert _differ(expected, (out.detach(), *gradients)) == []


def test_checkpoint_recomputes_it() -> None:
    inputs, dout = _inputs()
    with KEPT:
        expected = _run(_causal, inputs, dout)
        leaves = [x.requires_grad_() for x in inputs]
        options: dict[str, Any] = {"use_reentrant": False, "context_fn": checkpoint_contexts}
        out = checkpoint(_causal, *leaves, **options)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert _differ(expected, (out.detach(), *gradients)) == []


def test_compiled_call_keeps_it() -> None:
    inputs, dout = _inputs()
    torch._dynamo.reset()
    compiled = torch.compile(_causal, fullgraph=True, backend="aot_eager")
    for mode in (PLAIN, KEPT):
        with mode:
            assert _differ(_run(compiled, inputs, dout), _run(_causal, inputs, dout)) == []


def test_low_level_forward_refuses_it() -> None:
    (q, k, v), _ = _inputs()
    with KEPT, pytest.raises(UnsupportedError, match=r"keep_residual: expected False .*, got True"):
        low_level.forward(q, k, v, (0.0, 0.2, False, (-1, -1), 0.0))
