"""Derivatives without a formula are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import CALLS, DIFFERENTIABLE, Call, compiled, fresh
from flash_attn_deterministic.errors import UnsupportedError
from torch.autograd import forward_ad

# A warning of torch when it first uses forward mode: its category changed with torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

every_name = pytest.mark.parametrize("name", CALLS)
names = pytest.mark.parametrize("name", DIFFERENTIABLE)
Function = Callable[[torch.Tensor], Any]


def of_one_tensor(call: Call, **options: Any) -> tuple[Function, torch.Tensor]:
    """The call as a function of its first tensor, and that tensor."""
    name, *_ = call.arguments
    return (lambda x: fresh(call)(**{name: x}, **options)), call.arguments[name]


# --- Forward mode -------------------------------------------------------------------------------


def dual_level(function: Function, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():  # type: ignore[no-untyped-call, unused-ignore]
        return function(forward_ad.make_dual(x, torch.ones_like(x)))  # type: ignore[no-untyped-call, unused-ignore]


def jvp(function: Function, x: torch.Tensor) -> Any:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))


def jvp_of_grad(function: Function, x: torch.Tensor) -> Any:
    return jvp(torch.func.grad(lambda y: function(y).sum()), x)


@pytest.mark.parametrize("transform", [dual_level, jvp])
@every_name
def test_forward_mode_is_refused(
    name: str, transform: Callable[[Function, torch.Tensor], Any]
) -> None:
    with pytest.raises(UnsupportedError, match=r"forward-mode AD: .* use backward\(\)"):
        transform(*of_one_tensor(CALLS[name](32)))


@names
def test_nested_forward_mode_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"use backward\(\)"):
        jvp_of_grad(*of_one_tensor(CALLS[name](32)))


@pytest.mark.parametrize("before", [False, True], ids=["first", "compiled-before"])
@names
def test_forward_mode_is_refused_in_a_compiled_call(name: str, before: bool) -> None:
    function, x = of_one_tensor(CALLS[name](32))
    function = compiled(function)
    if before:
        function(x)
    # From torch 2.15 on torch.compile refuses such an input itself.
    refused = (UnsupportedError, torch._dynamo.exc.Unsupported)
    with pytest.raises(refused, match=r"forward-mode AD( tangent|: .* tangent)"):
        dual_level(function, x)


@pytest.mark.usefixtures("dynamo")
def test_forward_mode_is_refused_in_a_compiled_cache_call() -> None:
    function, x = of_one_tensor(CALLS["flash_attn_with_kvcache"](32))
    with pytest.raises(UnsupportedError, match=r"forward-mode AD: .* carries a tangent"):
        dual_level(torch.compile(function, backend="aot_eager"), x)
    # With fullgraph=True torch.compile raises its own exception, caused by ours.
    with pytest.raises(Exception, match="forward-mode AD: "):
        dual_level(compiled(function), x)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@names
def test_call_without_tangents_inside_a_level(name: str, compiles: bool) -> None:
    function, x = of_one_tensor(CALLS[name](32))
    expected = function(x)
    if compiles:
        function = compiled(function)
    assert bits_equal(dual_level(lambda _: function(x), x), expected)


@every_name
def test_call_without_dual_inputs_inside_forward_mode(name: str) -> None:
    function, x = of_one_tensor(CALLS[name](32))
    expected = function(x)
    found, tangent = jvp(lambda y: (y.sum(), function(x)), x)
    assert bits_equal(found[1], expected)
    assert not tangent[1].any()
    assert bits_equal(jvp(lambda y: (y.sum(), function(y.detach())), x)[0][1], expected)


# --- torch.func ---------------------------------------------------------------------------------


def grad(function: Function, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda y: function(y).sum())(x)


@names
def test_transforms_of_torch_func_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.func: .* use backward\(\)"):
        grad(*of_one_tensor(CALLS[name](32)))


@names
def test_call_on_other_tensors_inside_a_transform(name: str) -> None:
    function, x = of_one_tensor(CALLS[name](32))
    expected = function(x)
    assert grad(lambda y: y.sum() * function(x).float(), x).shape == x.shape

    def without(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = function(y)
        assert bits_equal(torch.func.debug_unwrap(out), expected)
        return y * out.sum()

    assert grad(without, x).shape == x.shape


def test_cache_call_has_no_gradient_inside_a_transform() -> None:
    function, x = of_one_tensor(CALLS["flash_attn_with_kvcache"](32))
    assert not grad(function, x).any()
