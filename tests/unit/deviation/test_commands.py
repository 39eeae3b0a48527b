"""The studies of `deviation all`, in small on a CPU: each runs, and runs again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.deviation.study.all_studies import STARTS, STUDIES, run_all
from flash_attn_deterministic.deviation.study.files import read_json

SMALL = {
    "cuda": "cpu", "language-25m": "language-tiny", "language-100m": "language-tiny",
    "drawings-medium": "drawings-tiny", "16": "3", "24": "3",
}  # fmt: skip
# On a CPU, or slow there.
LEFT_OUT = {"ours-atomics", "sdpa-flash", "sdpa-cudnn", "data", "explicit:p24"}


def _small(argument: str) -> str:
    names = [name for name in argument.split(",") if name not in LEFT_OUT]
    return SMALL.get(argument, ",".join(names) if len(names) > 1 else argument)


def test_they_run_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (_, text) in STUDIES.items():
            if name == "kernels":
                continue  # has tests of its own
            line = ["deviation", *map(_small, text.format(seconds=1).split())]
            if name == "tokens":
                line[line.index("ours,sdpa-flash")] = "ours,sdpa"
            assert main(line) == 0, line
            if name in ("training", "gradients"):
                # Once more: what is done is not done again, and the end is the same.
                assert main(line) == 0, line
    finally:
        torch.set_num_threads(threads)
    found = read_json(tmp_path / "training" / "training.json")
    assert found["configuration"]["steps"] >= 10
    assert found["seeds"]["0"]
    assert read_json(tmp_path / "gradients" / "gradients.json")["done"] >= 2
    assert read_json(tmp_path / "tokens" / "tokens.json")["tokens"] > 0


@pytest.mark.parametrize("trained", [False, True])
def test_a_study_that_fails_or_hangs_costs_no_other(
    trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, float] = {}
    now = 0.0

    def run(command: list[str], cwd: Path, timeout: float, check: bool) -> Any:
        nonlocal now
        assert (command[1:4], cwd) == (["-m", "flash_attn_deterministic", "deviation"], tmp_path)
        name = list(STUDIES)[len(started)]
        started[name] = timeout
        if "--seconds" in command:
            # What a study takes at most leaves time for its start.
            assert float(command[command.index("--seconds") + 1]) <= max(1, timeout - STARTS)
        if name == "training" and trained:  # its first run, before it failed
            (tmp_path / "training").mkdir()
            (tmp_path / "training" / "base.pt").touch()
        if name in ("gradients", "tokens"):
            assert ("--checkpoint" in command) == trained
        if name == "gradients":
            now += timeout
            raise subprocess.TimeoutExpired(command, timeout)
        now += 0.5 * timeout
        return SimpleNamespace(returncode=1 if name == "training" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("time.monotonic", lambda: now)
    wrong = run_all(tmp_path, 330)
    assert set(wrong) == {"training", "gradients"}
    assert list(started) == list(STUDIES)
    assert now <= 330
    # Time that others leave is for those after them.
    assert started["kernels"] > 330 * STUDIES["kernels"][0] / sum(s for s, _ in STUDIES.values())
