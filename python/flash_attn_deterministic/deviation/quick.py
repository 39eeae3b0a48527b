"""Small studies of all kinds, to try everything in about a minute."""

from __future__ import annotations

from pathlib import Path

from .forward import FIGURES, Plan, quick_plan, run_forward
from .kernels import KernelPlan, run_kernels
from .training.study import plan_of, run_training


def quick_studies(folder: Path) -> list[Path]:
    """Runs or resumes quick studies in folders of `folder`, and returns them."""
    folders = [folder / f"quick-{name}" for name in ("forward", "kernels", "training")]
    run_forward(quick_plan(Plan(figures=tuple(FIGURES))), folders[0])
    run_kernels(KernelPlan("cpu", quick=True, seeds=2), folders[1])
    run_training(plan_of("tiny", "cpu", None, None, quick=True), folders[2])
    return folders
