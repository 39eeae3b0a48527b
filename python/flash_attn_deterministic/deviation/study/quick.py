"""Small studies of all kinds, to try everything in about a minute."""

from __future__ import annotations

from pathlib import Path

from ..forward.plan import FIGURES, Plan, quick_plan, run_forward
from ..kernels.kernel_study import run_kernels
from ..kernels.plan import KernelPlan
from ..training.training_study import plan_of, run_training

_RUNS = ("repeat", "paper", "init", "fp16", "data")


def quick_studies(folder: Path) -> list[Path]:
    """Runs quick studies in folders of `folder`, and returns them."""
    folders = [folder / f"quick-{name}" for name in ("forward", "kernels", "training")]
    run_forward(quick_plan(Plan(figures=tuple(FIGURES))), folders[0])
    run_kernels(KernelPlan("cpu", quick=True, seeds=2), folders[1])
    plan = plan_of("drawings-tiny", "cpu", 12, _RUNS, seeds=(0, 1, 2))
    run_training(plan, folders[2], force=True)
    return folders
