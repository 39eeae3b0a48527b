"""The argument deterministic, and torch.use_deterministic_algorithms."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from calls import CALLS, DIFFERENTIABLE, compiled, qkv_call
from flash_attn_deterministic import deterministic_mode, flash_attn_func
from flash_attn_deterministic import mode as current
from flash_attn_deterministic.errors import (
    ArgumentTypeError,
    MissingInstanceError,
    NotDeterministicError,
)
from flash_attn_deterministic.interface import call as steps
from flash_attn_deterministic.mode import Mode, resolve_deterministic
from flash_attn_deterministic.ops import autograd
from flash_attn_deterministic.ops.autograd import alert_atomics

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@contextlib.contextmanager
def deterministic_only(warn_only: bool = False) -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) in a block."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def only_deterministic() -> Iterator[None]:
    """The same for one test."""
    with deterministic_only():
        yield


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the check run as for a GPU."""
    monkeypatch.setattr(autograd, "alert_atomics", lambda device: alert_atomics(CUDA))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "value", [0, np.bool_(False), torch.tensor(False)], ids=["int", "numpy", "tensor"]
)
def test_false_follows_the_mode(value: object, enabled: bool) -> None:
    """False is flash_attn's default, which transformers passes in every call."""
    assert resolve_deterministic(value, Mode(enabled, 0)) is enabled


@pytest.mark.usefixtures("only_deterministic")
@pytest.mark.parametrize(("value", "wanted"), [(None, True), (False, True), ("never", False)])
def test_torchs_setting_switches_the_backward(value: object, wanted: bool) -> None:
    assert resolve_deterministic(value, Mode(False, 0)) is wanted


def test_options_that_were_found_before_the_setting_do_not_count() -> None:
    arguments = qkv_call().arguments
    leaf = arguments["q"].requires_grad_()

    def backward_flag() -> bool:
        out = flash_attn_func(**arguments)
        return bool(out.grad_fn.numbers[-1])

    with deterministic_mode(False):
        assert not backward_flag()
        with deterministic_only():
            assert backward_flag()
    assert leaf.requires_grad


@pytest.mark.parametrize("value", ["True", 0.5, "x" * 1000], ids=["str", "float", "long"])
def test_deterministic_is_a_flag(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"deterministic: expected a bool.*, got") as caught:
        resolve_deterministic(value, Mode(True, 0))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_wheel_without_deterministic_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_WHEEL_DETERMINISTIC", False)
    steps._known_options.cache_clear()  # those found for a wheel that has them
    message = "deterministic: this wheel .*=OFF .* or pass deterministic=False"
    with pytest.raises(MissingInstanceError, match=message):
        CALLS[name](32)(deterministic=True)
    with deterministic_mode(False):
        CALLS[name](32)(deterministic=False)
        CALLS[name](32)()


def test_torch_allows_atomics_by_default() -> None:
    alert_atomics(CUDA)


@pytest.mark.usefixtures("only_deterministic")
def test_torch_refuses_atomics() -> None:
    with pytest.raises(NotDeterministicError, match=r"does not have a deterministic .* pass det"):
        alert_atomics(CUDA)
    alert_atomics(CPU)
    assert issubclass(NotDeterministicError, RuntimeError)  # what torch raises


def test_torch_warns_of_atomics() -> None:
    with deterministic_only(warn_only=True):
        with pytest.warns(UserWarning, match=r"does not have a deterministic .*warn_only=True"):
            alert_atomics(CUDA)
        alert_atomics(CPU)


@pytest.mark.usefixtures("only_deterministic", "as_on_cuda")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_checks_the_setting_of_torch(name: str) -> None:
    call = CALLS[name](32)
    leaves = call.leaves()
    # Forwards never add atomically.
    out = call(**leaves, deterministic="never")
    with pytest.raises(NotDeterministicError):
        out.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(**leaves, deterministic=True).sum().backward()
        call(**leaves).sum().backward()
        call(**leaves, deterministic=False).sum().backward()


@pytest.mark.usefixtures("only_deterministic", "as_on_cuda")
def test_compiled_backward_checks_the_setting_of_torch() -> None:
    call = qkv_call()
    function, arguments = compiled(call.function), {**call.arguments, **call.leaves()}
    function(**arguments).sum().backward()
    assert arguments["q"].grad is not None
    with pytest.raises(Exception, match="does not have a deterministic implementation"):
        function(**arguments, deterministic="never").sum().backward()
