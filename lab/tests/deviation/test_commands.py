"""The studies of `deviation all`, in small on a CPU: each runs, and runs again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.cli import main
from flash_attn_deterministic_lab.deviation.study.all_studies import STUDIES, command_line, run_all
from flash_attn_deterministic_lab.deviation.study.files import read_result


def test_they_run_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in STUDIES:
            if name == "kernels":
                continue  # has tests of its own
            line = ["deviation", *command_line(name, "cpu", 1).split()]
            assert main(line) == 0, line
            if name in ("training", "gradients"):
                # Once more: what is done is not done again, and the end is the same.
                assert main(line) == 0, line
    finally:
        torch.set_num_threads(threads)
    found = read_result(tmp_path / "training", "training")
    assert found["configuration"]["steps"] >= 10
    assert found["seeds"]["0"]
    assert read_result(tmp_path / "gradients", "gradients")["done"] >= 2
    assert read_result(tmp_path / "tokens", "tokens")["tokens"] > 0


def test_a_study_that_fails_or_hangs_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, float] = {}
    now = 0.0

    def run(command: list[str], cwd: Path = tmp_path, timeout: float = 0, **_: Any) -> Any:
        nonlocal now
        if command[1] == "-c":
            now += 10  # how long a process takes to start
            return None
        assert (command[1:4], cwd) == (
            ["-m", "flash_attn_deterministic_lab.cli", "deviation"],
            tmp_path,
        )
        name = list(STUDIES)[len(started)]
        started[name] = timeout
        if "--seconds" in command:
            # What a study takes at most leaves time for its start.
            assert float(command[command.index("--seconds") + 1]) <= max(1, timeout / 2 - 10)
        if name == "gradients":
            now += timeout
            raise subprocess.TimeoutExpired(command, timeout)
        now += 0.25 * timeout
        return SimpleNamespace(returncode=1 if name == "training" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("time.monotonic", lambda: now)
    wrong = run_all(tmp_path, 330, "cuda")
    assert set(wrong) == {"training", "gradients"}
    assert list(started) == list(STUDIES)
    assert now <= 330
    # Time that others leave is for those after them.
    assert started["kernels"] > 330 * STUDIES["kernels"][0] / sum(s for s, _ in STUDIES.values())
