"""The mode of functions that are recomputed in the backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import compiled, normal
from flash_attn_deterministic import (
    Mode,
    checkpoint_contexts,
    deterministic_mode,
    flash_attn_qkvpacked_func,
    get_deterministic_mode,
    private,
    set_deterministic_mode,
)
from torch.utils.checkpoint import checkpoint

SPLIT = 64
LONG = 150  # tokens; with splits of SPLIT tokens other bits than with one split
KEY = "flash_attn_deterministic.mode"


@pytest.fixture(autouse=True)
def one_split() -> Iterator[None]:
    """A process mode that differs from those of the tests."""
    before = get_deterministic_mode()
    set_deterministic_mode(split_size=0)
    yield
    set_deterministic_mode(*before)
    assert private.get_state(KEY) is None


class Recorded:
    """Attention that records the mode and the thread of each run."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.threads: set[int] = set()
        self.outs: list[torch.Tensor] = []

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        self.modes.append(get_deterministic_mode())
        self.threads.add(threading.get_ident())
        out: torch.Tensor = flash_attn_qkvpacked_func(qkv, causal=True)
        self.outs.append(out.detach().clone())
        return out.sin()


def _qkv() -> torch.Tensor:
    return normal(1, LONG, 3, 2, 16).requires_grad_()


def _gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    qkv = _qkv()
    run(qkv).sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    assert qkv.grad is not None
    return qkv.grad


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
@pytest.mark.parametrize("mode", [(True, SPLIT), (False, None)], ids=["splits", "disabled"])
def test_context_fn_restores_the_first_mode(mode: tuple[bool, int | None], inside: bool) -> None:
    with deterministic_mode(*mode):
        expected = _gradient(Recorded())
        function, qkv = Recorded(), _qkv()
        out = checkpoint(function, qkv, use_reentrant=False, context_fn=checkpoint_contexts)
        if inside:
            out.sum().backward()
    if not inside:
        with deterministic_mode(split_size=2 * SPLIT):
            out.sum().backward()
    assert qkv.grad is not None
    assert len(function.modes) == 2
    assert function.modes[0] == function.modes[1]
    assert bits_equal(*function.outs)
    assert bits_equal(qkv.grad, expected)
    assert get_deterministic_mode() == Mode(True, 0)


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
def test_context_fn_compiles(inside: bool) -> None:
    def attention(qkv: torch.Tensor) -> torch.Tensor:
        return flash_attn_qkvpacked_func(qkv, causal=True).sin()

    def checkpointed(qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(
            attention, qkv, use_reentrant=False, context_fn=checkpoint_contexts
        )
        return out

    function = compiled(checkpointed)
    with deterministic_mode(split_size=SPLIT):
        expected = _gradient(checkpointed)
        qkv = _qkv()
        out: Any = function(qkv).sum()
        if inside:
            out.backward()
    if not inside:
        out.backward()
    assert qkv.grad is not None
    assert bits_equal(qkv.grad, expected)
    assert not bits_equal(qkv.grad, _gradient(function))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_decorated_function_keeps_its_mode(use_reentrant: bool) -> None:
    recorded, qkv = Recorded(), _qkv()
    function = deterministic_mode(split_size=SPLIT)(recorded.__call__)
    checkpoint(function, qkv, use_reentrant=use_reentrant).sum().backward()
    assert qkv.grad is not None
    assert recorded.modes == [Mode(True, SPLIT)] * 2
    assert bits_equal(*recorded.outs)
    with deterministic_mode(split_size=SPLIT):
        assert bits_equal(qkv.grad, _gradient(Recorded()))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_dropout_is_recomputed_with_the_same_mask(use_reentrant: bool) -> None:
    def attention(qkv: torch.Tensor) -> torch.Tensor:
        return flash_attn_qkvpacked_func(qkv, 0.3, causal=True).sin()

    torch.manual_seed(0)
    expected = _gradient(attention)
    torch.manual_seed(0)
    found = _gradient(lambda qkv: checkpoint(attention, qkv, use_reentrant=use_reentrant))
    assert bits_equal(found, expected)


# --- Threads of the autograd engine -------------------------------------------------------------


def _deep(function: Callable[[torch.Tensor], torch.Tensor], depth: int) -> Any:
    """Checkpoints inside checkpoints: the engine runs deep ones in threads of its own."""
    if depth == 0:
        return function

    def call(qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(_deep(function, depth - 1), qkv, use_reentrant=True)
        return out

    return call


def _deep_backward(block: Any) -> Recorded:
    function = Recorded()
    with block:
        qkv = normal(1, 3, 3, 1, 16).requires_grad_()
        _deep(function, 70)(qkv).sum().backward()
    # Without this the test would prove nothing.
    assert len(function.threads) > 1
    assert len(function.modes) > 1
    return function


@pytest.mark.skipif(not private.HAS_STATE, reason="this torch hands nothing on")
@pytest.mark.parametrize("mode", [Mode(True, SPLIT), Mode(False, 0)], ids=["splits", "disabled"])
def test_engine_threads_have_the_mode_of_the_caller_of_backward(mode: Mode) -> None:
    function = _deep_backward(deterministic_mode(mode.enabled, mode.split_size))
    assert set(function.modes) == {mode}


def test_engine_threads_do_not_keep_the_mode() -> None:
    _deep_backward(deterministic_mode(split_size=SPLIT))
    assert set(_deep_backward(nullcontext()).modes) == {Mode(True, 0)}


def test_torch_without_shared_thread_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "HAS_STATE", False)
    function = _deep_backward(deterministic_mode(split_size=SPLIT))
    assert function.modes[0] == Mode(True, SPLIT)
    assert Mode(True, 0) in function.modes


@pytest.mark.parametrize(
    "around", [nullcontext(), deterministic_mode(split_size=2 * SPLIT)], ids=["alone", "nested"]
)
def test_block_with_a_graph_break_restores_the_mode(around: Any) -> None:
    def function(qkv: torch.Tensor) -> torch.Tensor:
        with deterministic_mode(split_size=SPLIT):
            first = qkv.sin()
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call, unused-ignore]
            return flash_attn_qkvpacked_func(first, causal=True)

    torch._dynamo.reset()
    qkv = _qkv().detach()
    with around:
        before = get_deterministic_mode(), private.get_state(KEY)
        found = torch.compile(function, backend="aot_eager")(qkv)
        assert (get_deterministic_mode(), private.get_state(KEY)) == before
    with deterministic_mode(split_size=SPLIT):
        assert bits_equal(found, flash_attn_qkvpacked_func(qkv.sin(), causal=True))


@pytest.mark.skipif(not private.HAS_STATE, reason="this torch hands nothing on")
def test_thread_state() -> None:
    value = object()
    references = sys.getrefcount(value)
    assert private.get_state("name") is None
    private.put_state("name", None)
    for _ in range(3):
        private.put_state("name", value)
        assert private.get_state("name") is value
        private.put_state("name", None)
        assert private.get_state("name") is None
    assert sys.getrefcount(value) == references
