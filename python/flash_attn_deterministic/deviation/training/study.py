"""The training study: base first, then every run against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ..capture import dual_compute
from ..files import read_json, write_json
from ..parallel import each
from ..progress import Progress
from ..study import SCHEMA, environment, open_study, stopwatch
from .attention import find_attention
from .model import SIZES
from .runs import RUNS, Setup, train

RESULT_FILE = "training.json"
_DEFAULT_RUNS = ("repeat", "flash", "sdpa", "init", "fp32", "fp16", "pure_bf16", "data")


@dataclass(frozen=True)
class TrainingPlan:
    """A study: the setup, and the runs that are compared with base."""

    setup: Setup
    runs: tuple[str, ...]

    def configuration(self) -> dict[str, Any]:
        # Which runs there are does not change any of them: more may be added to a folder.
        return {"setup": asdict(self.setup)}


def plan_of(
    size: str,
    device: str,
    steps: int | None,
    runs: Sequence[str] | None,
    workload: str = "",
    quick: bool = False,
) -> TrainingPlan:
    """Makes a plan.

    Args:
        size: of the drawings, a name of SIZES.
        device: cpu or cuda.
        steps: optimizer steps; None: those of the size.
        runs: names of RUNS; None: all but `ours` on the CPU, all on a GPU.
        workload: MODULE:FUNCTION; "": the drawings.
        quick: the tiny size.

    Raises:
        ArgumentError: an unknown name, no positive number of steps, or no such device.
    """
    size = "tiny" if quick else size
    if size not in SIZES:
        raise ArgumentError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
    steps = SIZES[size].steps if steps is None else steps
    if steps < 1:
        raise ArgumentError(f"steps: expected at least 1, got {steps}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device: expected a CUDA device for cuda, got a machine without one")
    if runs is None:
        runs = _DEFAULT_RUNS if device == "cpu" else (*_DEFAULT_RUNS, "ours")
        if quick:
            runs = ("repeat", "flash", "init", "pure_bf16", "data")
    unknown = [name for name in runs if name not in RUNS]
    if unknown:
        raise ArgumentError(f"runs: expected names of {', '.join(RUNS)}, got {unknown[0]!r}")
    setup = Setup(workload, size, steps, max(1, steps // 20), device)
    return TrainingPlan(setup, tuple(name for name in runs if name != "base"))


def run_training(
    plan: TrainingPlan, folder: Path, force: bool = False, jobs: int = 1
) -> dict[str, Any]:
    """Runs or resumes the study in a folder, and writes its training.json.

    Args:
        plan: what to run.
        folder: of the study.
        force: whether another study in the folder is replaced.
        jobs: processes, of the runs after base; a GPU takes one at a time.

    Returns:
        Its content: {"runs": {name: {"run", "history"}}, "live": ..., ...}.

    Raises:
        ArgumentError: the folder holds another study.
    """
    plan.setup.make_workload()
    jobs = 1 if plan.setup.device == "cuda" else jobs
    key = open_study(folder, "training", plan.configuration(), force)
    before = 0.0
    path = folder / RESULT_FILE
    if path.exists():
        before = float(read_json(path).get("seconds", 0.0))
    with stopwatch() as taken:
        histories = _train_all(plan, folder, key, jobs)
        live = _live(plan.setup, folder, key) if not plan.setup.workload else []
    value = {
        "kind": "training",
        "schema": SCHEMA,
        "hash": key,
        "configuration": {
            **plan.configuration(), "model": asdict(SIZES[plan.setup.size]),
        },
        "environment": environment(plan.setup.device),
        "seconds": before + taken[0],
        "runs": {
            name: {"run": asdict(RUNS[name]), "history": history}
            for name, history in histories.items()
        },
        "live": live,
    }  # fmt: skip
    write_json(path, value)
    return value


def _train_all(plan: TrainingPlan, folder: Path, key: str, jobs: int) -> dict[str, Any]:
    points = len(plan.setup.points())
    total = points * (1 + len(plan.runs))
    with Progress("training", total) as progress:
        histories = {"base": _run("base", plan.setup, folder, key)}
        progress.advance("base", points)
        # float16 takes several times as long on a CPU: not as the last one, alone.
        order = sorted(plan.runs, key=lambda name: RUNS[name].precision != "fp16")
        for name, history in each(_run, order, jobs, plan.setup, folder, key):
            histories[name] = history
            progress.advance(name, points)
    return {name: histories[name] for name in ("base", *plan.runs)}


def _run(name: str, setup: Setup, folder: Path, key: str) -> dict[str, Any]:
    """Trains a run; with one thread on a CPU, so that a repeat is exact."""
    threads = torch.get_num_threads()
    if setup.device == "cpu":
        torch.set_num_threads(1)
    try:
        return train(setup, RUNS[name], folder, key, lambda: None)
    finally:
        torch.set_num_threads(threads)


def _live(setup: Setup, folder: Path, key: str) -> list[dict[str, Any]]:
    """Both attentions inside the base model, before and after its training."""
    result = []
    for when in ("before", "after"):
        torch.manual_seed(RUNS["base"].init_seed)
        workload = setup.make_workload()
        model = workload.model(find_attention("sdpa"))
        if when == "after":
            saved = torch.load(folder / "runs" / "base" / "checkpoint.pt", weights_only=True)
            model.load_state_dict({name: t.cpu() for name, t in saved["model"].items()})
        with torch.no_grad(), dual_compute(model, "bf16", "paper", block_c=16) as record:
            workload.loss(model, torch.Generator().manual_seed(2**31))
        for call in record.calls:
            result.append(
                {
                    "when": when,
                    "layer": call.layer,
                    "shape": call.shape,
                    **{
                        f"{pair}_{metric}": sum(values[metric]) / len(values[metric])
                        for pair, values in (("flash", call.flash), ("baseline", call.baseline))
                        for metric in ("max", "mean", "rmse")
                    },
                }
            )
    return result


def read_training(path: Path) -> dict[str, Any]:
    """Reads training.json.

    Raises:
        ArgumentError: the file is no result of this study.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != "training":
        raise ArgumentError(f"{path}: expected the result of a training study")
    return value
