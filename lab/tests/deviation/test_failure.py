"""The published training failure's mechanism, and what cures it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.deviation.attentions.masks import Call
from flash_attn_deterministic_lab.deviation.instrument.gradients import run_gradients
from flash_attn_deterministic_lab.deviation.instrument.target import ModelPlan, load_target
from flash_attn_deterministic_lab.deviation.study import environment
from flash_attn_deterministic_lab.deviation.training.runs import Run, Setup, train
from flash_attn_deterministic_lab.deviation.training.sinks import Sinks

Whole = dict[str, dict[str, list[float]]]
NAMES = ("torch-lines", "torch-lines-shifted", "kernel", "kernel+residual", "kernel+residual8",
         "ours", "ours+residual")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with environment.one_thread():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Gradients of W_q on rows with equal maxima."""
    target = load_target("sinks-small", "", 24, "cpu")
    folder = tmp_path_factory.mktemp("sinks")
    found: Whole = run_gradients(ModelPlan("sinks-small", NAMES), target, folder)["whole"]
    return found


def test_rows_of_the_workload_have_equal_maxima_and_values_of_one_sign() -> None:
    workload = Sinks()
    seen: list[Call] = []

    def attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        seen.append(Call(query, key, value))
        return query

    torch.manual_seed(0)
    model = workload.model(attend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        workload.loss(model, workload.batch(torch.Generator().manual_seed(0)))
    (call,) = seen
    assert call.q.shape == call.k.shape == call.v.shape == (8, 1, 64, 64)
    scores = call.q.double() @ call.k.double().mT
    equal = (scores == scores.amax(-1, keepdim=True)).sum(-1)
    assert bool((equal == 2).all())
    assert bool((call.v < 0).all())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["query.weight"]


def test_sixteen_bits_after_each_line_give_the_gradient_a_direction(whole: Whole) -> None:
    assert whole["torch-lines"]["systematic"][0] > 0.5
    assert whole["torch-lines"]["error"][0] > 10  # of a gradient that is almost 0


def test_the_published_remedy_removes_the_direction(whole: Whole) -> None:
    low, _, high = whole["torch-lines-shifted"]["systematic"]
    assert low < 0.1
    assert high < whole["torch-lines"]["systematic"][0]


@pytest.mark.parametrize("cure", ["kernel+residual", "kernel+residual8", "ours+residual"])
def test_a_residual_of_the_output_removes_the_error_of_kernels(whole: Whole, cure: str) -> None:
    assert whole[cure]["error"][2] < 0.3 * whole[cure.partition("+")[0]]["error"][0]
    assert whole[cure]["systematic"][0] < 0.1


def test_weights_drift_with_the_rounded_output_and_stay_with_its_residual() -> None:
    setup = Setup("sinks-small", "exact", steps=20, device="cpu")
    _, base, _ = train(setup, Run("base", against=""), 0, None, keep=True)
    moved = {
        name: train(setup, Run(name, attention=name), 0, base, keep=False)[0]["l2"][-1]
        for name in ("torch-lines", "kernel", "kernel+residual")
    }
    assert moved["kernel+residual"] < 0.2 * moved["kernel"]
    assert moved["kernel+residual"] < 0.2 * moved["torch-lines"]
