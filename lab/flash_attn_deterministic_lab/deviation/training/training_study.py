"""The training study: for each seed a base run, and runs that differ from it in one thing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...attentions.named import first_line_or_kind
from ...cli import check_device
from ...errors import ArgumentError
from ..attentions.registry import find_attention
from ..numbers.intervals import mean_interval, short
from ..study.environment import Progress, one_thread, repeatable
from ..study.files import new_result, read_result, whole_file, write_result
from .runs import Run, Setup, States, train
from .workload import find_workload

_NAMED = {
    run.name: run
    for run in (
        Run("base", against=""),
        Run("repeat"),
        Run("nudge", nudge=True),
        Run("init", init=1),
        Run("data", data=1),
        Run("fp32", precision="fp32"),
        Run("fp16", precision="fp16", against="fp32"),
        Run("pure_bf16", precision="pure_bf16"),
    )
}
_CONTROLS = ("repeat", "nudge", "init", "data")
_ON_GPU = ("ours-atomics", "sdpa-flash", "sdpa-cudnn", "explicit")
_ON_CPU = ("sdpa", "kernel", "paper", "fp32", "fp16", "pure_bf16")


def run_of(name: str) -> Run:
    """Returns the run of a name: one of the named ones, or one with that attention."""
    if name not in _NAMED:
        find_attention(name)
    return _NAMED.get(name, Run(name, attention=name))


@dataclass(frozen=True)
class TrainingPlan:
    """A study."""

    setup: Setup  # of all runs
    runs: tuple[str, ...]  # names, see `run_of`; base is always there
    seeds: tuple[int, ...]  # paired: all runs of a seed share initial weights and batches

    def ordered(self) -> list[Run]:
        """Returns the runs, each after the one that it is compared with."""
        names = dict.fromkeys(("base", *self.runs))
        found = [run_of(name) for name in names]
        wanted = dict.fromkeys(run.against for run in found if run.against)
        return list({run.name: run for run in (*map(run_of, wanted), *found)}.values())


def plan_of(
    workload: str,
    device: str,
    steps: int,
    runs: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    base: str = "",
) -> TrainingPlan:
    """Makes a plan of names, see `find_workload`, `run_of` and `find_attention`.

    Without a base it is ours on a GPU and explicit on a CPU; without runs there are, beside the
    controls, real kernels on a GPU, number formats and emulated attentions on a CPU.

    Raises:
        ArgumentError: an unknown name, a number of steps below 1, or no such device.
    """
    find_workload(workload)
    check_device(device)
    if steps < 1:
        raise ArgumentError(f"steps: expected at least 1, got {steps}")
    if not seeds or min(seeds) < 0:
        raise ArgumentError(f"seeds: expected at least one, from 0, got {tuple(seeds)}")
    usual, others = ("ours", _ON_GPU) if device == "cuda" else ("explicit", _ON_CPU)
    names = tuple(runs) or (*_CONTROLS, *others)
    for name in names:
        run_of(name)
    find_attention(base or usual)
    return TrainingPlan(Setup(workload, base or usual, steps, device), names, tuple(seeds))


def run_training(plan: TrainingPlan, folder: Path, seconds: float | None = None) -> dict[str, Any]:
    """Runs or resumes the study in a folder; training.json is written after each run.

    No run is started that would end later than `seconds`.

    Returns:
        training.json: {"runs": {name: run}, "seeds": {seed: {name: history}}, "missing": {name of
        a run that does not work here: why}, "unrepeatable": [what torch says of operations that
        need not repeat], ...}.

    Raises:
        ArgumentError: the folder holds another study.
    """
    start = time.monotonic()
    value = _opened(plan, folder)
    runs = plan.ordered()
    names, seeds = {run.name for run in runs}, [str(seed) for seed in plan.seeds]
    new_runs = sum(len(names - value["seeds"].get(seed, {}).keys()) for seed in seeds)
    slowest, progress = 0.0, Progress("training", new_runs)
    with repeatable(plan.setup.device) as warned, one_thread(plan.setup.device):
        for seed in plan.seeds:
            histories = value["seeds"].setdefault(str(seed), {})
            todo = names - histories.keys()
            needed = {run.against for run in runs if run.name in todo}
            kept: dict[str, States] = {}
            for run in runs:
                keep, new = run.name in needed, run.name in todo
                if not (keep or new) or {run.name, run.against} & value["missing"].keys():
                    continue
                before = time.monotonic()
                # The first run is what other studies of the model begin with.
                if seconds is not None and slowest and before - start + slowest > seconds:
                    break
                try:
                    history, states, model = train(
                        plan.setup, run, seed, kept.get(run.against), keep
                    )
                except Exception as error:  # the other runs still have a result
                    if run.name == "base":
                        raise
                    value["missing"][run.name] = first_line_or_kind(error)
                    continue
                if keep:
                    kept[run.name] = states
                if new:
                    value["runs"][run.name], histories[run.name] = asdict(run), history
                    progress.advance(f"seed {seed} {run.name}")
                if new and run.name == "base" and seed == plan.seeds[0]:
                    with whole_file(folder / "base.pt") as temporary:
                        torch.save(model.state_dict(), temporary)
                slowest = max(slowest, 1.1 * (time.monotonic() - before))
                value["seconds"] += time.monotonic() - before
                write_result(folder, value, digits=8)
                del model, states
    value["unrepeatable"] = sorted({*value["unrepeatable"], *warned})
    write_result(folder, value, digits=8)
    return value


def _opened(plan: TrainingPlan, folder: Path) -> dict[str, Any]:
    configuration = asdict(plan.setup)
    fresh = {
        **new_result("training", configuration, plan.setup.device),
        "seconds": 0.0, "runs": {}, "seeds": {}, "missing": {}, "unrepeatable": [],
    }  # fmt: skip
    if not (folder / "training.json").exists():
        return fresh
    found = {**fresh, **read_result(folder, "training"), "missing": {}}
    if found["configuration"] != configuration:
        raise ArgumentError(
            f"out: {folder} holds a study of another configuration "
            f"({found['configuration']}); give another folder with --out"
        )
    return found


def by_seed(value: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Returns a run's history of each seed that has it, and the run it is compared with."""
    against = value["runs"].get(name, {}).get("against", "")
    return {
        seed: histories[name]
        for seed, histories in value["seeds"].items()
        if name in histories and (not against or against in histories)
    }


def probe_changes(value: dict[str, Any], name: str) -> list[float | None]:
    """Returns, for each seed, a run's loss on other batches less that of its counterpart."""
    against = value["runs"].get(name, {}).get("against", "")
    return [
        minus(history["probe"], value["seeds"][seed].get(against, {}).get("probe"))
        for seed, history in by_seed(value, name).items()
    ]


def minus(left: float | None, right: float | None) -> float | None:
    """Returns left - right; None where one is missing."""
    return None if left is None or right is None else left - right


def summary(value: dict[str, Any]) -> list[list[str]]:
    """Returns one row per run: distances from the run it is compared with, at the end."""
    rows = []
    for name, run in value["runs"].items():
        histories = by_seed(value, name)
        if not histories:
            continue
        probe = mean_interval([history["probe"] for history in histories.values()])
        loss = probe.shown("{:.4f}".format)
        changes: list[list[float | None]] = []
        if run["against"]:
            changes.append(probe_changes(value, name))
            for measure in ("l2", "function", "wasserstein"):
                changes.append([history[measure][-1] for history in histories.values()])
        cells = [str(mean_interval(change)) for change in changes] or ["-"] * 4
        rows.append([name, str(len(histories)), run["against"] or "-", loss, *cells])
    return rows


SUMMARY_HEADER = [
    "run", "seeds", "against", "loss at the end", "less the other's", "L2 of weights",
    "function", "Wasserstein",
]  # fmt: skip


def printed(value: dict[str, Any]) -> str:
    """Returns the summary as text, in columns."""
    rows = [SUMMARY_HEADER, *summary(value)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"missing: {name}: {reason}" for name, reason in value["missing"].items()]
    steps = value["configuration"]["steps"]
    lines.append(f"{steps} steps each, {short(value['seconds'])} s of runs in all")
    return "\n".join(lines)
