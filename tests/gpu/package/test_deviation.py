"""The studies on a GPU: what they find of this wheel must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flash_attn_deterministic_lab.deviation.instrument.gradients import run_gradients
from flash_attn_deterministic_lab.deviation.instrument.target import ModelPlan, load_target
from flash_attn_deterministic_lab.deviation.instrument.tokens import run_tokens
from flash_attn_deterministic_lab.deviation.kernels.kernel_study import KernelPlan, run_kernels
from flash_attn_deterministic_lab.deviation.study.files import read_result
from flash_attn_deterministic_lab.deviation.training.first_difference import first_difference
from flash_attn_deterministic_lab.deviation.training.runs import Setup
from flash_attn_deterministic_lab.deviation.training.training_study import plan_of, run_training

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kernels")
    run_kernels(KernelPlan("cuda", quick=True, seeds=2), folder)
    return read_result(folder, "kernels")


def test_our_kernels_are_at_least_as_accurate_as_explicit_attention(study: dict[str, Any]) -> None:
    def worst(backend: str, inputs: str, seqlen: int) -> float:
        found: list[float] = [
            max(point["result"]["rmse"])
            for point in study["forward"]
            if (point["backend"], point["format"]) == (backend, "bf16")
            and (point["inputs"], point["seqlen"]) == (inputs, seqlen)
        ]
        return max(found)

    for point in study["forward"]:
        inputs, seqlen = point["inputs"], point["seqlen"]
        assert worst("ours", inputs, seqlen) <= 1.1 * worst("explicit", inputs, seqlen)


def test_our_gradients_are_about_as_near_as_torchs(study: dict[str, Any]) -> None:
    reason = study["missing"]["backward"].get("ours")
    if reason:
        pytest.skip(f"no backward: {reason}")
    keys = ("format", "inputs", "gradient", "head_dim", "seqlen")
    worst = {
        (point["backend"], tuple(point[key] for key in keys)): max(point["result"]["rmse"])
        for point in study["backward"]
    }
    ours = {where: rmse for (backend, where), rmse in worst.items() if backend == "ours"}
    torchs = {where: rmse for (backend, where), rmse in worst.items() if backend == "sdpa-flash"}
    assert ours.keys() & torchs.keys()
    for where in ours.keys() & torchs.keys():
        assert ours[where] <= 2 * torchs[where], where


def test_training_with_our_kernels_repeats(tmp_path: Path) -> None:
    plan = plan_of("language-25m", "cuda", 6, ("repeat", "sdpa-flash"), (0,), "ours")
    value = run_training(plan, tmp_path)
    found = value["seeds"]["0"]
    if max(found["repeat"]["max_difference"]) > 0:
        pytest.fail(f"{first_difference(plan.setup)}; torch says: {value['unrepeatable']}")
    assert found["sdpa-flash"]["l2"][-1] > 0


@pytest.mark.parametrize("attention", ["ours", "explicit"])
def test_every_operation_of_a_training_repeats(attention: str) -> None:
    """With explicit attention the rest of the model is tested alone."""
    assert first_difference(Setup("language-25m", attention, 3, "cuda"), times=2) is None


def test_our_gradients_and_tokens_in_a_model(tmp_path: Path) -> None:
    target = load_target("language-25m", "", 3, "cuda")
    plan = ModelPlan("language-25m", ("ours", "explicit"), device="cuda")
    whole = run_gradients(plan, target, tmp_path)["whole"]
    assert 0 < whole["ours"]["error"][1] < 0.05
    value = run_tokens(plan, target, tmp_path)
    assert value["batch_invariant"]["ours"]
    assert 0 <= value["kl"][1] < 1e-3
