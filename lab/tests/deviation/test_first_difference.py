"""The search for the first operation that does not repeat finds the one that was planted."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.deviation.study.environment import repeatable
from flash_attn_deterministic_lab.deviation.training.first_difference import first_difference
from flash_attn_deterministic_lab.deviation.training.runs import Setup
from torch.nn import functional


class _Unsteady:
    """Attention whose call number `bad` has one other bit, forward or backward."""

    def __init__(self, bad: int, backward: bool) -> None:
        self.bad, self.backward, self.calls = bad, backward, 0

    def __call__(self, q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = functional.scaled_dot_product_attention(q, *rest, **options)
        if not torch.is_grad_enabled():
            return out
        self.calls += 1
        if self.calls != self.bad:
            return out
        if self.backward:
            hooked: Any = out
            hooked.register_hook(lambda gradient: torch.nextafter(gradient, gradient + 1))
            return out
        return torch.where(out == out.detach().amax(), out * 1.0078125, out)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("my_unsteady")
    monkeypatch.setitem(sys.modules, "my_unsteady", module)
    return module


def test_a_training_that_repeats_has_no_difference() -> None:
    assert first_difference(Setup("language-tiny", "ours", 2, "cpu"), 1) is None


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_other_operations_than_before_are_named(plant: types.ModuleType, backward: bool) -> None:
    # Two layers: a run has two calls a step, so call 7 is the second step of the second run.
    plant.attend = _Unsteady(7, backward)  # type: ignore[attr-defined]
    setup = Setup("language-tiny", "my_unsteady:attend", 2, "cpu")
    found = first_difference(setup, 1)
    assert found is not None
    assert found.startswith("repeat 1, step 1: ")
    assert " in the place of aten." in found
    assert "all that came before has equal bits" in found


def test_an_operation_with_other_bits_is_named_by_its_result(plant: types.ModuleType) -> None:
    """No other operations than before, one of them with another result: a kernel with a race."""
    noise = iter([0.0] * 5 + [1e-3] + [0.0] * 10)

    @torch.library.custom_op("unsteady_test::attend", mutates_args=())
    def attend(q: torch.Tensor) -> torch.Tensor:
        return q + next(noise)

    attend.register_autograd(lambda ctx, gradient: gradient)

    def attention(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return q.clone()
        out: torch.Tensor = attend(q)
        return out

    plant.attend = attention  # type: ignore[attr-defined]
    found = first_difference(Setup("language-tiny", "my_unsteady:attend", 2, "cpu"), 1)
    assert found is not None
    assert found.startswith("repeat 1, step 0: unsteady_test.attend.default (operation ")
    assert "): (4, 2, 48, 16) differs; " in found


def test_torch_is_asked_for_repeatable_algorithms_and_given_back() -> None:
    with repeatable() as found:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        warnings.warn("f does not have a deterministic implementation", stacklevel=1)
        warnings.warn("f does not have a deterministic implementation", stacklevel=1)
    assert found == ["f does not have a deterministic implementation"]
    assert not torch.are_deterministic_algorithms_enabled()
    with repeatable(fill=True):
        assert torch.empty(5).isnan().all()
    with pytest.warns(UserWarning, match="something else"), repeatable():
        warnings.warn("something else", stacklevel=1)
