"""The commands for a GPU that the docs give, in small on a CPU: each runs, and goes on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.deviation.study.files import read_json

DOCS = Path(__file__).parents[2] / "docs" / "deviation.md"
SMALL = {
    "cuda": "cpu", "language-25m": "language-tiny", "language-100m": "language-tiny",
    "drawings-medium": "drawings-tiny", "105": "1", "35": "1", "16": "3", "8": "3",
    "repeat,data,explicit,ours-atomics,sdpa-flash,sdpa-cudnn": "repeat,explicit,sdpa",
    "repeat,data,explicit,ours-atomics,sdpa-flash": "repeat,sdpa",
    "ours,ours-atomics,sdpa-flash,sdpa-cudnn,explicit,explicit:p24,torch-lines": "ours,torch-lines",
    "ours,sdpa-flash": "ours,sdpa",
}  # fmt: skip


def commands() -> list[list[str]]:
    """The commands of the docs' section on a GPU, each as arguments."""
    section = DOCS.read_text().partition("### On a GPU")[2].partition("\n## ")[0]
    lines = re.findall(r"^    flash-attn-deterministic (deviation .*)$", section, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_their_times_fit() -> None:
    """330 seconds: what --seconds bounds, the kernels' study, and the start of each."""
    bounded = sum(float(line[line.index("--seconds") + 1]) for line in commands()
                  if "--seconds" in line)  # fmt: skip
    assert [line[1] for line in commands()] == [
        "repeat", "training", "gradients", "tokens", "training", "kernels"
    ]  # fmt: skip
    assert bounded + 45 + 20 + 10 * len(commands()) <= 330


def test_they_run_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for line in commands():
            small = [SMALL.get(argument, argument) for argument in line]
            if small[1] == "kernels":
                continue  # has tests of its own
            # Once more: what is done is not done again, and the end is the same.
            assert main(small) == 0, line
            if small[1] != "repeat":
                assert main(small) == 0, line
    finally:
        torch.set_num_threads(threads)
    found = read_json(tmp_path / "gpu" / "training" / "training.json")
    assert found["configuration"]["steps"] >= 10
    assert found["seeds"]["0"]
    assert read_json(tmp_path / "gpu" / "gradients" / "gradients.json")["done"] >= 2
    assert read_json(tmp_path / "gpu" / "tokens" / "tokens.json")["tokens"] > 0
