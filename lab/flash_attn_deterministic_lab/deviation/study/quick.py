"""Every study in small, to try them and their report."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..forward.plan import Plan, run_forward
from ..kernels.kernel_study import KernelPlan, run_kernels
from ..training.training_study import plan_of, run_training


def quick_studies(folder: Path) -> list[Path]:
    """Runs quick studies in folders of `folder`, and returns them."""
    folders = [folder / f"quick-{name}" for name in ("forward", "kernels", "training")]
    run_forward(Plan(seeds=3, quick=True), folders[0])
    run_kernels(KernelPlan("cpu", quick=True, seeds=2), folders[1])
    runs = ("repeat", "nudge-1", "paper", "init", "fp16", "fp16-paper", "data")
    plan = plan_of("drawings-tiny", "cpu", 12, runs, seeds=(0, 1, 2))
    shutil.rmtree(folders[2], ignore_errors=True)  # it would go on
    run_training(plan, folders[2])
    return folders
