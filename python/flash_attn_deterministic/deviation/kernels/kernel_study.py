"""Runs the parts of the study of real kernels, and writes their result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..attentions.registry import usable
from ..study.environment import SCHEMA, environment, stopwatch
from ..study.files import read_result, write_json
from ..study.progress import Progress
from .agreement import agreement
from .deviations import backward_deviation, forward_deviation
from .plan import COMPARED, KernelPlan
from .repeats import run_to_run
from .speed import speed

RESULT_FILE = "kernels.json"


def run_kernels(plan: KernelPlan, folder: Path) -> dict[str, Any]:
    """Runs the study and writes its kernels.json.

    A part that fails is left out of it and named: the others are still worth their time on a GPU.

    Returns:
        Its content: {"forward": [...], "agreement": [...], "backward": [...], "run_to_run": [...],
        "speed": [...], "missing": {...}, "failed": {part: message}, ...}; each list has one dict
        per point.

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
        "speed": speed,
    }
    results: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    with Progress("kernels", len(parts)) as progress, warnings.catch_warnings():
        # torch's warning that a kernel of the backward is not deterministic: that is the subject.
        warnings.simplefilter("ignore")
        for name, part in parts.items():
            with stopwatch() as taken:
                try:
                    results[name] = part(plan)
                except Exception as error:
                    results[name] = []
                    failed[name] = f"{type(error).__name__}: {error}"
            seconds[name] = taken[0]
            progress.advance(name)
    if len(failed) == len(parts):
        raise RuntimeError(f"every part of the study failed; the first: {failed['forward']}")
    missing = {
        direction: usable(COMPARED, plan.device, torch.bfloat16, 64, direction == "backward")[1]
        for direction in ("forward", "backward")
    }
    value = {
        "kind": "kernels",
        "schema": SCHEMA,
        "configuration": asdict(plan),
        "environment": environment(plan.device),
        "seconds": seconds,
        "missing": missing,
        "failed": failed,
        **results,
    }
    write_json(folder / RESULT_FILE, value, digits=4)
    return value


def read_kernels(path: Path) -> dict[str, Any]:
    """Reads kernels.json.

    Raises:
        ArgumentError: the file is no result of this study.
    """
    return read_result(path, "kernels", SCHEMA, "a study of kernels")
