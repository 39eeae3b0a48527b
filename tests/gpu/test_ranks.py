"""Attention over several GPUs equals one: `verify --ranks`, the training example, a dead rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count()
several = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@several
@pytest.mark.parametrize("count", sorted({2, min(4, GPUS), min(8, GPUS)}))
def test_ranks_equal_one_gpu(tmp_path: Path, count: int) -> None:
    command = [sys.executable, "-m", "flash_attn_deterministic", "verify", "--quick"]
    command += ["--ranks", str(count), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    report = tmp_path / "ranks.json"
    assert done.returncode == 0, (
        done.stdout + done.stderr + (report.read_text() if report.exists() else "")
    )
    record = json.loads(report.read_text())
    assert record["status"] == "passed"
    assert record["rows"][-1]["ranks"] == count
    assert record["rows"][-1]["cases"] > 20


@several
def test_a_long_sequence_equals_one_gpu(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "tests.benchmarks.ranks", "--out", str(out)]
    command += ["--lengths", "16384", "--repeats", "1", "--unit-heads", "1", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    assert case["same_bits"] is True
    assert case["efficiency"]["both"] > 0.5, case


@several
def test_training_has_the_bits_of_one_gpu() -> None:
    script = ROOT / "examples" / "train_over_ranks.py"
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(script)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "losses and weights have the same bits: yes"


@several
def test_a_rank_that_dies_ends_the_others() -> None:
    environment = {**os.environ, "TORCH_NCCL_BLOCKING_WAIT": "1"}
    begin = time.monotonic()
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", "-m", "tests.gpu.dying_rank"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode != 0
    assert "RankError" in done.stdout + done.stderr
    assert time.monotonic() - begin < 120
