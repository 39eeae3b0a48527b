"""The study of real kernels on a GPU: what it finds of this wheel must hold."""

from __future__ import annotations

from typing import Any

import pytest
from flash_attn_deterministic.deviation.claims import AGREEMENT, EQUAL
from flash_attn_deterministic.deviation.kernels import (
    CONTROL,
    KernelPlan,
    read_kernels,
    run_kernels,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kernels")
    run_kernels(KernelPlan("cuda", quick=True, seeds=2), folder)
    return read_kernels(folder / "kernels.json")


def test_our_forward_and_torchs_are_there(study: dict[str, Any]) -> None:
    found = {point["backend"] for point in study["forward"]}
    assert {"ours", "ours_nondeterministic", "torch_math", "baseline"} <= found


def test_presets_agree_with_the_kernels_within_a_unit(study: dict[str, Any]) -> None:
    assert study["agreement"]
    for point in study["agreement"]:
        if point["preset"] != CONTROL:
            assert point["within_1_ulp"] >= AGREEMENT, point
            assert point["equal"] >= EQUAL, point


def test_a_wrong_model_of_the_kernels_does_not(study: dict[str, Any]) -> None:
    for point in study["agreement"]:
        if (point["preset"], point["inputs"]) == (CONTROL, "normal"):
            assert point["equal"] < EQUAL, point


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
        assert worst("ours", inputs, seqlen) <= 1.1 * worst("baseline", inputs, seqlen)


def test_our_kernels_have_no_run_to_run_variance(study: dict[str, Any]) -> None:
    found = [point for point in study["run_to_run"] if point["backend"] == "ours"]
    assert found
    for point in found:
        assert point["same_bits"], point


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
    torchs = {where: rmse for (backend, where), rmse in worst.items() if backend == "torch_flash"}
    assert ours.keys() & torchs.keys()
    for where in ours.keys() & torchs.keys():
        assert ours[where] <= 2 * torchs[where], where
