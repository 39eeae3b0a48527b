"""The example scripts run, and keep what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(script: str, *arguments: str) -> list[str]:
    pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLES / script), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_whole_model_keeps_its_bits() -> None:
    *_, ours = run("whole_model.py")
    assert ours.split()[:6] == ["flash_attn_deterministic", "invariant", *["same"] * 4]


def test_a_trainer_computes_what_the_rollout_sampled(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run("policy_gradient.py", "--json", str(file))
    steps = json.loads(file.read_text())["flash_attn_deterministic"]
    assert len(steps) == 10
    assert {(step["kl"], step["unequal"]) for step in steps} == {(0, 0)}
    assert steps[-1]["reward"] > 0.7


def test_training_over_ranks_has_the_bits_of_one_device() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(EXAMPLES / "train_over_ranks.py"), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--length", "128"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "losses and weights have the same bits: yes"
    steps = [line for line in lines if line.startswith("step")]  # gloo of torch 2.10 prints, too
    assert len(steps) == 20
    first, last = (float(line.split()[2]) for line in (steps[0], steps[-1]))
    assert last < first / 2
