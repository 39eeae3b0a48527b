"""Every study: small, to try them; or on a GPU within a total time, each in its own process.

A process that fails, or is stopped at the end of its time, takes its memory and its errors of the
device with it. Studies write their results as they go.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..forward.plan import FIGURES, Plan, quick_plan, run_forward
from ..kernels.kernel_study import KernelPlan, run_kernels
from ..training.training_study import plan_of, run_training

_TINY = {"-25m": "-tiny", "-100m": "-tiny", "-medium": "-tiny"}  # to try the commands on a CPU
_FLASH = "ours,ours-atomics,ours+residual,sdpa-flash,sdpa-cudnn"
_LINES = "explicit,torch-lines,torch-lines-shifted"
_CHECKPOINT = "training/base.pt"
_TRAINED = f"--model language-100m --checkpoint {_CHECKPOINT} --seconds {{seconds}}"
# Shares of the time, and arguments of `deviation` in the folder of results.
STUDIES: dict[str, tuple[float, str]] = {
    "repeat": (25, "repeat --workload language-25m --steps 3 --times 2"),
    "training": (
        105,
        "training --workload language-100m --base ours --seconds {seconds} --out training "
        "--runs repeat,data,explicit,ours-atomics,sdpa-flash,sdpa-cudnn",
    ),
    "gradients": (
        50,
        f"gradients {_TRAINED} --count 16 --attention {_FLASH},explicit,explicit:p24,torch-lines "
        "--no-plots --out gradients",
    ),
    "tokens": (20, f"tokens {_TRAINED} --attention ours,sdpa-flash --out tokens"),
    "sinks": (
        20,
        f"gradients --model sinks-small --count 24 --attention {_FLASH},{_LINES} "
        "--seconds {seconds} --no-plots --out sinks",
    ),
    "drawings": (
        40,
        "training --workload drawings-medium --base ours --seconds {seconds} --out drawings "
        "--runs repeat,data,explicit,ours-atomics,sdpa-flash",
    ),
    "kernels": (70, "kernels --out kernels"),
}


def command_line(name: str, device: str, seconds: float) -> str:
    """Returns the arguments of `deviation` for a study that ends itself within `seconds`."""
    line = f"{STUDIES[name][1]} --device {device}".format(seconds=max(1, round(seconds)))
    if device == "cpu":
        for large, tiny in _TINY.items():
            line = line.replace(large, tiny)
    return line


def run_all(out: Path, seconds: float, device: str) -> dict[str, str]:
    """Runs every study, and prints what it prints, which is also kept in NAME.log.

    Args:
        out: folder with a folder for each study.
        seconds: in which all end. Time that a study leaves is for those after it. A study ends
            itself within its share; one that takes twice as long is stopped.
        device: cuda; or cpu, with tiny models.

    Returns:
        What went wrong, by study; empty where nothing did.
    """
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    starts = _start_seconds(device)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a study that is stopped has printed too
    wrong: dict[str, str] = {}
    shares = sum(share for share, _ in STUDIES.values())
    for number, (name, (share, _)) in enumerate(STUDIES.items()):
        start = time.monotonic()
        # What the starts of this one and of those after it leave is divided.
        work = max(0.0, end - start - starts * (len(STUDIES) - number)) * share / shares
        limit = starts + work
        shares -= share
        # Its own bound leaves time for what comes after the last piece of work.
        line = command_line(name, device, 0.8 * work)
        if not (out / _CHECKPOINT).exists():
            line = line.replace(f"--checkpoint {_CHECKPOINT} ", "")  # weights as they begin
        print(f"{name}, {limit:.0f} s: deviation {line}", flush=True)
        command = [
            sys.executable,
            "-m",
            "flash_attn_deterministic_lab.cli",
            "deviation",
            *line.split(),
        ]
        most = min(2 * limit, max(0.0, end - start))
        try:
            with (out / f"{name}.log").open("w") as log:
                status = subprocess.run(
                    command, cwd=out, env=environment, timeout=most, check=False,
                    stdout=log, stderr=subprocess.STDOUT,
                ).returncode  # fmt: skip
            if status:
                wrong[name] = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            wrong[name] = "stopped at the end of its time"
        print((out / f"{name}.log").read_text(), end="")
        taken = time.monotonic() - start
        print(f"{name}: {wrong.get(name, 'done')}, {taken:.0f} s\n", flush=True)
    return wrong


def _start_seconds(device: str) -> float:
    """Measures how long a process takes until it has imported torch and has its device."""
    before = time.monotonic()
    code = f"import torch; torch.zeros(1, device={device!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.monotonic() - before


def quick_studies(folder: Path) -> list[Path]:
    """Runs quick studies in folders of `folder`, and returns them."""
    folders = [folder / f"quick-{name}" for name in ("forward", "kernels", "training")]
    run_forward(quick_plan(Plan(figures=tuple(FIGURES))), folders[0])
    run_kernels(KernelPlan("cpu", quick=True, seeds=2), folders[1])
    runs = ("repeat", "paper", "init", "fp16", "data")
    plan = plan_of("drawings-tiny", "cpu", 12, runs, seeds=(0, 1, 2))
    shutil.rmtree(folders[2], ignore_errors=True)  # it would go on
    run_training(plan, folders[2])
    return folders
