from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.deviation.attentions.registry import find_attention
from flash_attn_deterministic_lab.deviation.kernels import kernel_study
from flash_attn_deterministic_lab.deviation.kernels.kernel_study import (
    KernelPlan,
    failures,
    run_kernels,
    run_to_run,
)
from flash_attn_deterministic_lab.deviation.study.files import read_result
from flash_attn_deterministic_lab.errors import ArgumentError, UnavailableError

PLAN = KernelPlan("cpu", quick=True, seeds=1)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kernels")
    run_kernels(PLAN, folder)
    return read_result(folder, "kernels")


def _worst(study: dict[str, Any], backend: str, inputs: str) -> float:
    found: list[float] = [
        max(point["result"]["max"])
        for point in study["forward"]
        if (point["backend"], point["inputs"], point["format"]) == (backend, inputs, "bf16")
    ]
    return max(found)


def test_deviations_of_kernels_are_those_of_a_rounded_output(study: dict[str, Any]) -> None:
    # Outputs of uniform inputs are around 1/2, where half a gap of bfloat16 is 2**-9.
    for backend in ("ours", "sdpa-math"):
        assert 2.0**-10 < _worst(study, backend, "uniform") < 2.0**-8
    assert _worst(study, "explicit", "normal") > _worst(study, "sdpa-math", "normal")


def test_repeats_on_a_cpu_are_the_same_bits(study: dict[str, Any]) -> None:
    assert study["run_to_run"]
    assert all(point["same_bits"] for point in study["run_to_run"])


def test_gradients_are_near_float64s(study: dict[str, Any]) -> None:
    found = {(point["backend"], point["gradient"]) for point in study["backward"]}
    assert {("explicit", name) for name in ("dq", "dk", "dv")} <= found
    for point in study["backward"]:
        if point["inputs"] == "normal" and point["backend"] == "sdpa-math":
            assert max(point["result"]["relative"]) < 0.01


def test_what_does_not_run_here_says_why(study: dict[str, Any]) -> None:
    assert "sdpa-cudnn" in study["missing"]["forward"]
    assert all(study["missing"]["forward"].values())


class _ForwardAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise UnavailableError("the backward is not there yet\nat all")


def test_what_raises_is_missing_where_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("my_kernels")
    module.attend = lambda q, *_, **__: _ForwardAlone.apply(q)  # type: ignore[attr-defined, no-untyped-call]
    monkeypatch.setitem(sys.modules, "my_kernels", module)
    monkeypatch.setattr(kernel_study, "COMPARED", ("my_kernels:attend", "explicit"))
    value = run_kernels(PLAN, tmp_path)
    reason = {"my_kernels:attend": "the backward is not there yet"}
    assert value["missing"] == {"forward": {}, "backward": reason}
    assert {point["backend"] for point in value["forward"]} == {"my_kernels:attend", "explicit"}
    assert {point["backend"] for point in value["backward"]} == {"explicit"}


def test_our_kernels_that_raise_somewhere_fail_the_study() -> None:
    points = [{"backend": "ours"}, {"backend": "sdpa-flash"}]
    reasons = {"ours": "illegal access", "sdpa-flash": "no head dim 256", "ours-atomics": "no GPU"}
    value = {"missing": {"forward": reasons, "backward": {}}, "forward": points, "backward": []}
    assert failures(value) == ["forward: ours: illegal access"]


def test_run_to_run_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention whose repeats differ by one unit of one element is found out."""
    calls = 0
    plain = find_attention("sdpa-math")

    def noisy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = plain(q, k, v).detach().clone()
        if calls % 2:
            out.view(torch.int16)[0, 0, 0, 0] += 1
        return out

    monkeypatch.setattr(kernel_study, "find_attention", lambda _: noisy)
    assert not any(point["same_bits"] for point in run_to_run(PLAN, "forward", {}))


def test_bad_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="seeds: expected at least 1"):
        run_kernels(replace(PLAN, seeds=0), tmp_path / "new")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="device: expected a CUDA device"):
            run_kernels(replace(PLAN, device="cuda"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
