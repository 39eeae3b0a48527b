"""Every study: small, to try them; or on a GPU within a total time, each in its own process.

What fails, or runs out of its time, costs no other study: a process that ends takes its memory and
its errors of the device with it, and studies write their results as they go.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ..forward.plan import FIGURES, Plan, quick_plan, run_forward
from ..kernels.kernel_study import run_kernels
from ..kernels.plan import KernelPlan
from ..training.training_study import plan_of, run_training

STARTS = 10.0  # seconds until a process has imported torch and has its device
_BASE = "training/base.pt"
_LANGUAGE = f"--model language-100m --checkpoint {_BASE} --device cuda --seconds {{seconds}}"
_FLASH = "ours,ours-atomics,ours+residual,sdpa-flash,sdpa-cudnn"
# Shares of the time, and arguments of `deviation` in the folder of results.
STUDIES: dict[str, tuple[float, str]] = {
    "repeat": (25, "repeat --workload language-25m --device cuda --steps 3 --times 2"),
    "training": (
        105,
        "training --workload language-100m --device cuda --base ours --seconds {seconds} "
        "--runs repeat,data,explicit,ours-atomics,sdpa-flash,sdpa-cudnn --out training",
    ),
    "gradients": (
        50,
        f"gradients {_LANGUAGE} --count 16 --attention {_FLASH},explicit,explicit:p24,torch-lines "
        "--no-plots --out gradients",
    ),
    "tokens": (20, f"tokens {_LANGUAGE} --attention ours,sdpa-flash --out tokens"),
    "sinks": (
        20,
        f"gradients --model sinks-small --device cuda --count 24 --attention {_FLASH},explicit,"
        "torch-lines,torch-lines-shifted --seconds {seconds} --no-plots --out sinks",
    ),
    "drawings": (
        40,
        "training --workload drawings-medium --device cuda --base ours --seconds {seconds} "
        "--runs repeat,data,explicit,ours-atomics,sdpa-flash --out drawings",
    ),
    "kernels": (70, "kernels --out kernels"),
}


def run_all(out: Path, seconds: float) -> dict[str, str]:
    """Runs every study, and prints how each ended.

    Args:
        out: folder with a folder for each study.
        seconds: in which all end. Time that a study leaves is for those after it; one that takes
            longer than its share is stopped.

    Returns:
        What went wrong, by study; empty where nothing did.
    """
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    wrong: dict[str, str] = {}
    shares = sum(share for share, _ in STUDIES.values())
    for name, (share, arguments) in STUDIES.items():
        start = time.monotonic()
        limit = max(0.0, end - start) * share / shares
        shares -= share
        # Its own bound leaves time for the start, and for what comes after the last piece of work.
        line = arguments.format(seconds=max(1, round(0.8 * (limit - STARTS))))
        if _BASE in line and not (out / _BASE).exists():  # the training did not get that far
            line = line.replace(f"--checkpoint {_BASE} ", "")
        print(f"{name}, at most {limit:.0f} s: deviation {line}", flush=True)
        command = [sys.executable, "-m", "flash_attn_deterministic", "deviation", *line.split()]
        try:
            status = subprocess.run(command, cwd=out, timeout=limit, check=False).returncode
            if status:
                wrong[name] = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            wrong[name] = "stopped at the end of its time"
        taken = time.monotonic() - start
        print(f"{name}: {wrong.get(name, 'done')}, {taken:.0f} s\n", flush=True)
    return wrong


def quick_studies(folder: Path) -> list[Path]:
    """Runs quick studies in folders of `folder`, and returns them."""
    folders = [folder / f"quick-{name}" for name in ("forward", "kernels", "training")]
    run_forward(quick_plan(Plan(figures=tuple(FIGURES))), folders[0])
    run_kernels(KernelPlan("cpu", quick=True, seeds=2), folders[1])
    runs = ("repeat", "paper", "init", "fp16", "data")
    plan = plan_of("drawings-tiny", "cpu", 12, runs, seeds=(0, 1, 2))
    run_training(plan, folders[2], force=True)
    return folders
