"""Runs the parts of the study of real kernels, and writes their result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..attentions.registry import reason_of, usable
from ..study.environment import Progress
from ..study.files import new_result, write_result
from .agreement import agreement
from .deviations import backward_deviation, forward_deviation, run_to_run
from .plan import COMPARED, KernelPlan


def run_kernels(plan: KernelPlan, folder: Path) -> dict[str, Any]:
    """Runs the study and writes its kernels.json.

    It is written after each part. A part that fails is left out and named; the others still run.

    Returns:
        Its content: {"forward": [...], "agreement": [...], "backward": [...], "run_to_run": [...],
        "missing": {...}, "failed": {part: message}, ...}; each list has one dict per point.

    Raises:
        ArgumentError: no such device.
        RuntimeError: every part failed.
    """
    plan.check()
    parts: dict[str, Callable[[KernelPlan], list[dict[str, Any]]]] = {
        "forward": forward_deviation,
        "agreement": agreement,
        "backward": backward_deviation,
        "run_to_run": run_to_run,
    }
    value: dict[str, Any] = {
        **new_result("kernels", asdict(plan), plan.device),
        "seconds": {},
        "missing": {
            direction: usable(COMPARED, plan.device, torch.bfloat16, 64, direction == "backward")[1]
            for direction in ("forward", "backward")
        },
        "failed": {},
        **{name: [] for name in parts},
    }
    progress = Progress("kernels", len(parts))
    with warnings.catch_warnings():
        # torch's warning that a kernel of the backward is not deterministic: that is the subject.
        warnings.simplefilter("ignore")
        for name, part in parts.items():
            start = time.monotonic()
            try:
                value[name] = part(plan)
            except Exception as error:
                value["failed"][name] = f"{type(error).__name__}: {reason_of(error)}"
            value["seconds"][name] = time.monotonic() - start
            if len(value["failed"]) < len(value["seconds"]):
                write_result(folder, value)
            progress.advance(name)
    if len(value["failed"]) == len(parts):
        reason = value["failed"]["forward"]
        raise RuntimeError(f"every part of the study failed; the first: {reason}")
    return value
