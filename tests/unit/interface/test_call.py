"""The way of a call to its op: Python frames, torch's dispatcher, gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from attention_cases import make_inputs
from bits import all_equal, bits_equal
from calls import CALLS, Call, Recorder, normal, qkv_call
from flash_attn_deterministic import interface, private
from flash_attn_deterministic.errors import FlashAttnError
from flash_attn_deterministic.ops import autograd

names = pytest.mark.parametrize("name", CALLS)


def frames(call: Call) -> list[str]:
    """The functions of the package that run before the op's kernel, in order."""
    root = str(Path(package.__file__).parent)
    seen: list[str] = []
    inside = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal inside
        code = frame.f_code
        kernel = code.co_filename.endswith("cpu.py")
        if event == "call" and code.co_filename.startswith(root):
            inside += kernel
            if not inside:
                seen.append(code.co_name)
        elif event == "return" and kernel:
            inside -= 1

    call()  # options are known then
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("leaf", [False, True], ids=["no-grad", "grad"])
def test_frames_of_a_dense_call(leaf: bool) -> None:
    """Each costs the host a part of a microsecond, in each call."""
    call = qkv_call()
    call.arguments["q"].requires_grad_(leaf)
    assert len(frames(call)) <= (12 if leaf else 8), frames(call)


@names
def test_frames_of_every_call(name: str) -> None:
    assert len(frames(CALLS[name]())) <= 16, frames(CALLS[name]())


def test_wrong_call_with_dropout_draws_no_seed() -> None:
    state = torch.get_rng_state()
    with pytest.raises(FlashAttnError):
        qkv_call()(v=normal(2, 8, 2, 32), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


# --- The way to the op --------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 20])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_gradients_equal_those_of_the_dispatcher(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch.library's autograd kernel runs."""

    def gradients() -> tuple[torch.Tensor, ...]:
        call = CALLS[name](head_dim)
        leaves = call.leaves()
        out, softmax_lse, _ = call(**leaves, return_attn_probs=True)
        assert softmax_lse.requires_grad
        return (out.detach(), *torch.autograd.grad(out.sum(), list(leaves.values())))

    here = gradients()
    monkeypatch.setattr(autograd, "is_observed", lambda tensors: True)
    assert all_equal(here, gradients())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@names
def test_no_graph_is_recorded_without_gradients(name: str, mode: Callable[[], Any]) -> None:
    call = CALLS[name]()
    with mode():
        out = call(**call.leaves())
    assert out.grad_fn is None
    assert not out.requires_grad


def test_write_to_a_saved_tensor_raises() -> None:
    call = qkv_call()
    q = call.arguments["q"].requires_grad_()
    out = call()
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_modes_see_the_ops() -> None:
    call = qkv_call()
    with Recorder() as recorder:
        call(**call.leaves()).sum().backward()
    assert [name for name, _ in recorder.calls] == ["fwd", "bwd"]


def test_subclasses_see_the_op() -> None:
    seen = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            run = super().__torch_function__
            return run(func, types, args, kwargs or {})  # type: ignore[no-untyped-call, unused-ignore]

    q, k, v = (t.as_subclass(Seeing) for t in make_inputs(2, 5, 9, 4, 2, 32, torch.bfloat16))
    interface.flash_attn_func(q, k, v)
    assert any("flash_attn_deterministic.fwd" in name for name in seen)


def test_who_observes_a_call() -> None:
    q = torch.ones(2)
    assert not private.is_observed((q, torch.nn.Parameter(q), None))
    assert private.is_observed((q, q.as_subclass(type("Own", (torch.Tensor,), {}))))
    with Recorder():
        assert private.is_observed((q,))
    with torch.overrides.TorchFunctionMode():
        assert private.is_observed((q,))
    with torch.autograd.forward_ad.dual_level():
        assert private.is_observed((q,))
    seen = []
    torch.func.vmap(lambda x: seen.append(private.is_observed((x,))) or x)(q)  # type: ignore[func-returns-value]
    assert seen == [True]


def test_default_device_does_not_observe() -> None:
    call = qkv_call()
    expected = call()
    with torch.device("cpu"):
        assert not private.is_observed((call.arguments["q"],))
        leaf = call.arguments["q"].requires_grad_()
        out = call()
        out.sum().backward()
    assert bits_equal(out.detach(), expected)
    assert leaf.grad is not None
