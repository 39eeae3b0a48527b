"""The training study: for each seed a base run, and runs that differ from it in one thing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ..attentions.registry import find_attention, missing
from ..instrument.capture import dual_compute
from ..numbers.intervals import mean_interval, short
from ..study.environment import SCHEMA, check_device, environment, one_thread, repeatable
from ..study.files import read_result, whole_file, write_json
from ..study.progress import Progress
from .runs import Run, Setup, Snapshots, train
from .workload import find_workload

RESULT_FILE = "training.json"
CHECKPOINT_FILE = "base.pt"
_COMMON = (
    Run("base", against=""),
    Run("repeat"),
    Run("nudge", nudge=True),
    Run("init", init=1),
    Run("data", data=1),
)
_FORMATS = (
    Run("fp32", precision="fp32"),
    Run("fp16", precision="fp16", against="fp32"),
    Run("pure_bf16", precision="pure_bf16"),
)
NOISE = tuple(f"explicit:p{bits}" for bits in (5, 6, 8, 11, 16, 24))


def run_of(name: str) -> Run:
    """Returns the run of a name: one of the named ones, or one with that attention."""
    named = {run.name: run for run in (*_COMMON, *_FORMATS)}
    if name in named:
        return named[name]
    find_attention(name)
    return Run(name, attention=name)


@dataclass(frozen=True)
class TrainingPlan:
    """A study.

    Args:
        setup: of all runs.
        runs: names, see `run_of`; base is always there.
        seeds: paired: all runs of a seed share initial weights and batches.
    """

    setup: Setup
    runs: tuple[str, ...]
    seeds: tuple[int, ...]

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
    seeds: Sequence[int | str] = (0, 1, 2, 3, 4),
    base: str = "",
    more: Sequence[str] = (),
) -> TrainingPlan:
    """Makes a plan.

    Args:
        workload: see `find_workload`.
        device: cpu or cuda.
        steps: optimizer steps; 0: as many as fit into `seconds` of `run_training`.
        runs: names, see `run_of`; none: on a GPU the controls and real kernels, on a CPU the
            controls, number formats and emulated attentions.
        seeds: of the paired runs.
        base: attention of the base run; "": ours on a GPU, explicit on a CPU.
        more: names of runs beside `runs`.

    Raises:
        ArgumentError: an unknown name, a negative number of steps, or no such device.
    """
    find_workload(workload)
    check_device(device)
    if steps < 0:
        raise ArgumentError(f"steps: expected at least 0, got {steps}")
    try:
        numbers = tuple(int(seed) for seed in seeds)
    except ValueError as error:
        raise ArgumentError(
            f"seeds: expected whole numbers, got {', '.join(map(str, seeds))}"
        ) from error
    if not numbers or min(numbers) < 0:
        raise ArgumentError(f"seeds: expected at least one, from 0, got {numbers}")
    controls = ("repeat", "nudge", "init", "data")
    real = ("ours-atomics", "sdpa-flash", "sdpa-cudnn", "explicit")
    default = (
        (*controls, *real)
        if device == "cuda"
        else (*controls, "sdpa", "kernel", "paper", "fp32", "fp16", "pure_bf16")
    )
    for name in (*runs, *more):
        run_of(name)
    base = base or ("ours" if device == "cuda" else "explicit")
    find_attention(base)
    setup = Setup(workload, base, steps, device)
    return TrainingPlan(setup, (*(runs or default), *more), numbers)


def run_training(
    plan: TrainingPlan,
    folder: Path,
    seconds: float | None = None,
    budget: float | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Runs or resumes the study in a folder; training.json is written anew after each run.

    Args:
        plan: what to run. With 0 steps the number is measured: `budget` over what a step of all
            runs of all seeds takes.
        folder: of the study.
        seconds: no run is started that would end later than this; None: all are.
        budget: seconds of all calls together; None: `seconds`.
        force: whether another study in the folder is replaced.

    Returns:
        training.json: {"runs": {name: run}, "seeds": {seed: {name: history}}, "unrepeatable":
        [what torch says of operations that need not repeat], ...}.

    Raises:
        ArgumentError: the folder holds another study; or 0 steps without seconds or budget.
    """
    start = time.monotonic()
    path = folder / RESULT_FILE
    value = _opened(plan, path, force)
    steps = value["configuration"]["steps"] or plan.setup.steps
    if not steps:
        budget = seconds if budget is None else budget
        if budget is None:
            raise ArgumentError("steps: expected at least 1 without seconds or budget, got 0")
        steps = _fitting_steps(plan, budget)
    setup = replace(plan.setup, steps=steps)
    value["configuration"]["steps"] = steps
    runs = [run for run in plan.ordered() if _works(run, setup, value)]
    value["runs"].update({run.name: asdict(run) for run in runs})
    total = len(runs) * len(plan.seeds)
    done = sum(run.name in value["seeds"].get(str(seed), {})
               for seed in plan.seeds for run in runs)  # fmt: skip
    slowest = 0.0
    with (
        repeatable(setup.device) as warned,
        one_thread(setup.device),
        Progress("training", total, done) as progress,
    ):
        for seed in plan.seeds:
            histories = value["seeds"].setdefault(str(seed), {})
            todo = [run for run in runs if run.name not in histories]
            needed = {run.against for run in todo}
            kept: dict[str, Snapshots] = {}
            for run in runs:
                if run not in todo and run.name not in needed:
                    continue
                if seconds is not None and time.monotonic() - start + slowest > seconds:
                    break
                before = time.monotonic()
                keep = run.name in needed
                history, snapshots, model = train(setup, run, seed, kept.get(run.against), keep)
                slowest = max(slowest, 1.1 * (time.monotonic() - before))
                if keep:
                    kept[run.name] = snapshots
                if run.name not in histories:
                    histories[run.name] = history
                    progress.advance(f"seed {seed} {run.name}")
                if run.name == "base" and seed == plan.seeds[0] and not value["live"]:
                    _save(model, folder / CHECKPOINT_FILE)
                    value["live"] = _live(setup, model)
                value["seconds"] += time.monotonic() - before
                write_json(path, value)
                del model, snapshots
    value["unrepeatable"] = sorted({*value["unrepeatable"], *warned})
    write_json(path, value)
    return value


def _opened(plan: TrainingPlan, path: Path, force: bool) -> dict[str, Any]:
    configuration = asdict(plan.setup)
    fresh = {
        "kind": "training", "schema": SCHEMA, "configuration": configuration,
        "environment": environment(plan.setup.device), "seconds": 0.0, "runs": {}, "seeds": {},
        "missing": {}, "live": [], "unrepeatable": [],
    }  # fmt: skip
    if not path.exists() or force:
        return fresh
    found = {**fresh, **read_training(path)}
    # Without a number of steps, those of the study in the folder are meant.
    same = {**found["configuration"], "steps": configuration["steps"]}
    steps = configuration["steps"] in (0, found["configuration"]["steps"])
    if same != configuration or not steps:
        raise ArgumentError(
            f"out: {path.parent} holds a study of another configuration "
            f"({found['configuration']}); give another folder, or --force to replace it"
        )
    return found


def _works(run: Run, setup: Setup, value: dict[str, Any]) -> bool:
    """Whether a run's attention works here; why not is kept with the results."""
    if not run.attention or run.attention.startswith(("explicit", "exact")):
        return True
    dtype = torch.bfloat16
    reason = missing(find_attention(run.attention), setup.device, dtype, 64, backward=True)
    if reason:
        value["missing"][run.name] = reason
    return not reason


def _fitting_steps(plan: TrainingPlan, budget: float) -> int:
    """Measures how long steps take, and returns how many fit for all runs of all seeds."""
    taken: dict[tuple[str, str], float] = {}
    total = 0.0
    for run in plan.ordered():
        if not _works(run, plan.setup, {"missing": {}}):
            continue
        kind = (run.attention, run.precision)
        if kind not in taken:
            seconds = []
            for steps in (2, 0, 6):  # the first warms up
                before = time.monotonic()
                train(replace(plan.setup, steps=steps), run, 0, None, False)
                seconds.append(time.monotonic() - before)
            taken[kind] = max(1e-4, (seconds[2] - seconds[1]) / 6)
        total += taken[kind]
    # A third is for building models, snapshots and their comparison.
    return max(10, int(0.67 * budget / (total * len(plan.seeds))))


def _save(model: torch.nn.Module, path: Path) -> None:
    with whole_file(path) as temporary:
        torch.save({name: t.cpu() for name, t in model.state_dict().items()}, temporary)


def _live(setup: Setup, trained: torch.nn.Module) -> list[dict[str, Any]]:
    """Both attentions inside the base model, before and after its training."""
    result = []
    for when in ("before", "after"):
        torch.manual_seed(0)
        workload = find_workload(setup.workload)
        model = workload.model(find_attention("sdpa"))
        if when == "after":
            model.load_state_dict({name: t.cpu() for name, t in trained.state_dict().items()})
        batch = workload.batch(torch.Generator().manual_seed(2**31))
        if setup.device == "cuda":
            return []  # emulation of a large model takes long
        with torch.no_grad(), dual_compute(model, "bf16", "paper", block_c=16) as record:
            workload.loss(model, batch)
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
    return read_result(path, "training", SCHEMA, "a training study")


def by_seed(value: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Returns a run's history of each seed that has it, and the run it is compared with."""
    against = value["runs"].get(name, {}).get("against", "")
    return {
        seed: histories[name]
        for seed, histories in value["seeds"].items()
        if name in histories and (not against or against in histories)
    }


def summary(value: dict[str, Any]) -> list[list[str]]:
    """Returns one row per run: distances from the run it is compared with, at the end."""
    rows = []
    for name, run in value["runs"].items():
        histories = by_seed(value, name)
        if not histories:
            continue
        probe = mean_interval([history["probe"] for history in histories.values()])
        loss = f"{probe.middle:.4f} [{probe.low:.4f}, {probe.high:.4f}]"
        cells = [name, str(len(histories)), run["against"] or "-", loss]
        if run["against"]:
            change = [
                history["probe"] - value["seeds"][seed][run["against"]]["probe"]
                if history["probe"] is not None
                else None
                for seed, history in histories.items()
            ]
            cells.append(str(mean_interval(change)))
            for measure in ("l2", "function", "wasserstein"):
                ends = [history[measure][-1] for history in histories.values()]
                cells.append(str(mean_interval(ends)))
        else:
            cells += ["-"] * 4
        rows.append(cells)
    return rows


SUMMARY_HEADER = [
    "run", "seeds", "against", "loss at the end", "less the other's", "L2 of weights",
    "function", "Wasserstein",
]  # fmt: skip


def printed(value: dict[str, Any]) -> str:
    """Returns the summary as text, in columns."""
    rows = [SUMMARY_HEADER, *summary(value)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(SUMMARY_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [f"missing: {name}: {reason}" for name, reason in value["missing"].items()]
    steps = value["configuration"]["steps"]
    lines.append(f"{steps} steps each, {short(value['seconds'])} s of runs in all")
    return "\n".join(lines)
