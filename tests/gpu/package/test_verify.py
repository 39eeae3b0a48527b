"""verify on a GPU: the same list of contract checks, its measurements, and its sensitivity."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic import deterministic_mode, flash_attn_func
from flash_attn_deterministic.verify import accuracy, speed, tasks
from flash_attn_deterministic.verify.contract import CHECKS, Attention, run_check, size_of
from flash_attn_deterministic.verify.contract.sizes import Config
from flash_attn_deterministic.verify.outcome import Exit
from flash_attn_deterministic.verify.supervisor import Supervisor

from tests.drawn import draw_case

pytestmark = pytest.mark.gpu

BY_ID = {check.id: check for check in CHECKS}


def skip_unless_held(config: Config) -> None:
    if not tasks.holds("cuda")(config):
        pytest.skip(f"this wheel holds no forward for {config[1]} and head_dim {config[0]}")


@pytest.mark.parametrize("seed", range(200))
def test_accuracy_of_drawn_calls(seed: int) -> None:
    config, case = draw_case(seed, longest=2000)
    attention = Attention.installed()
    if seed % 4 == 0:
        attention = dataclasses.replace(attention, dense=atomic)
    assert_accurate(config, attention, [case])


def atomic(*args: Any, **kwargs: Any) -> Any:
    return flash_attn_func(*args, **{**kwargs, "deterministic": "never"})


def assert_accurate(config: Config, attention: Attention, among: Iterable[accuracy.Case]) -> None:
    skip_unless_held(config)
    rows = accuracy.measure(config, "cuda", attention, among)["rows"]
    assert rows
    assert [row for row in rows if not row["passed"]] == []


def schedule_dependent(*args: Any, **kwargs: Any) -> Any:
    """What the kernels do without the mode: splits by occupancy, atomic additions in dq."""
    kwargs.pop("split_size", None)
    with deterministic_mode(enabled=False):
        return flash_attn_func(*args, **{**kwargs, "deterministic": False})


@pytest.mark.parametrize("check_id", ["batch", "split-size", "backward"])
def test_the_checks_fail_what_is_schedule_dependent(check_id: str) -> None:
    config = (128, "bf16")
    skip_unless_held(config)
    size = dataclasses.replace(size_of("cuda", quick=True), configs=(config,))
    attention = dataclasses.replace(Attention.installed(), dense=schedule_dependent)
    assert run_check(BY_ID[check_id], size, attention).failed > 0


def test_memory_is_measured_above_the_inputs() -> None:
    skip_unless_held((64, "fp16"))
    row, _ = speed.measure("forward", Attention.installed(), quick=True)["rows"]
    out_and_lse = 4 * 2048 * 32 * (2 * 64 + 4)
    assert out_and_lse <= row["peak_bytes"]["ours"] < 1.1 * out_and_lse + 2**20


CRASHING = """
import torch

def execute(task, options, on_case):
    on_case("illegal", 0, 1)
    if task.id == "illegal":
        x = torch.zeros(8, device="cuda")
        x[torch.tensor([100], device="cuda")]  # an assertion on the device: the context is lost
        torch.cuda.synchronize()
    found = float(torch.ones(4, device="cuda").sum())
    return {"status": "passed", "data": {"sum": found}}
"""


def test_a_crash_on_the_device_fails_its_check_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_tasks.py").write_text(CRASHING)
    monkeypatch.syspath_prepend(tmp_path)
    execute = importlib.import_module("crashing_tasks").execute
    with Supervisor(tasks.Options("cuda", True), execute, silence=120) as supervisor:
        found = supervisor.run(tasks.Task("contract", "illegal"), lambda *case: None)
        assert found["status"] == "error"
        assert found["reason"]
        after = supervisor.run(tasks.Task("contract", "good"), lambda *case: None)
    assert after == {"status": "passed", "data": {"sum": 4.0}}


@pytest.mark.slow
def test_a_quick_run_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_attn_deterministic", "verify", "--quick"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    record = json.loads((tmp_path / "verification.json").read_text())
    assert record["complete"] is True
    assert record["seconds"] < 120
    assert record["environment"]["gpu"] == torch.cuda.get_device_name(0)
    # Another process on the GPU can spoil speed, nothing else.
    assert done.returncode in (Exit.PASSED, Exit.PERFORMANCE), done.stdout + done.stderr
