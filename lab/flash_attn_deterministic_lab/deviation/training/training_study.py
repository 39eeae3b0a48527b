"""The training study: for each seed a base run, and runs that differ from it in one thing."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...attentions.named import first_line_or_kind
from ...cli import check_device
from ...errors import ArgumentError
from ...shared.document import table
from ..attentions.registry import find_attention
from ..numbers.intervals import geometric_interval, mean_interval, short
from ..study.environment import Progress, one_thread, repeatable
from ..study.files import new_result, read_result, write_result
from .runs import Run, Setup, States, train
from .workload import find_workload

NUDGES = ("nudge-1", "nudge-2", "nudge-3")
FP16 = "fp16-"  # before the name of an attention: it in FP16, against the base's in FP16
_NAMED = {
    run.name: run
    for run in (
        Run("base", against=""),
        Run("repeat"),
        *(Run(name, nudge=number) for number, name in enumerate(NUDGES, 1)),
        Run("init", init=1),
        Run("data", data=1),
        Run("fp32", precision="fp32"),
        Run("fp16", precision="fp16", against="fp32"),
        Run("pure_bf16", precision="pure_bf16"),
    )
}
_CONTROLS = ("repeat", *NUDGES, "init", "data", "fp32", "fp16")
_ON_GPU = ("ours", "ours-atomics", "sdpa-flash", "sdpa-cudnn", "fp16-ours", "fp16-sdpa-flash")
_ON_CPU = ("kernel", "paper", "fp16-kernel", "fp16-paper", "pure_bf16")


def run_of(name: str) -> Run:
    """Returns the run of a name: a named one, or one with that attention, in FP16 after `FP16`."""
    if name in _NAMED:
        return _NAMED[name]
    attention = name.removeprefix(FP16)
    find_attention(attention)
    if attention == name:
        return Run(name, attention)
    return Run(name, attention, precision="fp16", against="fp16")


@dataclass(frozen=True)
class TrainingPlan:
    """A study."""

    setup: Setup  # of all runs
    runs: tuple[str, ...]  # names, see `run_of`; base is always there
    seeds: tuple[int, ...]  # paired: all runs of a seed share initial weights and batches

    def ordered(self) -> list[Run]:
        """Returns the runs, each after the one that it is compared with."""
        found: dict[str, Run] = {}

        def add(run: Run) -> None:
            if run.against:
                add(run_of(run.against))
            found.setdefault(run.name, run)

        for name in ("base", *self.runs):
            add(run_of(name))
        return list(found.values())


def plan_of(
    workload: str,
    device: str,
    steps: int,
    runs: Sequence[str] = (),
    seeds: Sequence[int] = tuple(range(16)),
    base: str = "explicit",
) -> TrainingPlan:
    """Makes a plan of names, see `find_workload`, `run_of` and `find_attention`.

    Without runs there are, beside the controls, real kernels on a GPU and emulated ones on a CPU.

    Raises:
        ArgumentError: an unknown name, a number of steps below 1, or no such device.
    """
    find_workload(workload)
    check_device(device)
    if steps < 1:
        raise ArgumentError(f"steps: expected at least 1, got {steps}")
    if not seeds or min(seeds) < 0:
        raise ArgumentError(f"seeds: expected at least one, from 0, got {tuple(seeds)}")
    names = tuple(runs) or (*_CONTROLS, *(_ON_GPU if device == "cuda" else _ON_CPU))
    for name in names:
        run_of(name)
    find_attention(base)
    return TrainingPlan(Setup(workload, base, steps, device), names, tuple(seeds))


def run_training(
    plan: TrainingPlan, folder: Path, seconds: float | None = None, jobs: int = 1
) -> dict[str, Any]:
    """Runs or resumes the study in a folder; training.json is written after each run.

    No run is started that would end later than `seconds`. With several jobs, so many processes
    train a seed each, and training.json is written after each seed.

    Returns:
        training.json: {"runs": {name: run}, "seeds": {seed: {name: history}}, "missing": {name of
        a run that does not work here: why}, "unrepeatable": [what torch says of operations that
        need not repeat], ...}.

    Raises:
        ArgumentError: the folder holds another study, or no job was asked for.
    """
    if jobs < 1:
        raise ArgumentError(f"jobs: expected at least 1, got {jobs}")
    until = math.inf if seconds is None else time.time() + seconds
    value = _opened(plan, folder)
    value["runs"] |= {run.name: asdict(run) for run in plan.ordered()}
    tasks = [_Seed(plan, seed, value["seeds"].setdefault(str(seed), {}), folder, until)
             for seed in plan.seeds]  # fmt: skip
    progress = Progress("training", sum(len(task.todo) for task in tasks))

    for found, names in _worked(tasks, jobs):
        value["seeds"][str(found.seed)] = found.histories
        value["missing"] |= found.missing
        value["unrepeatable"] = sorted({*value["unrepeatable"], *found.warned})
        value["seconds"] += found.seconds
        found.seconds = 0.0
        for name in names:
            progress.advance(f"seed {found.seed} {name}")
        write_result(folder, value, digits=8)
    return value


def _worked(tasks: Sequence[_Seed], jobs: int) -> Iterator[tuple[_Seed, Sequence[str]]]:
    """Trains, and yields what there is of a seed with the names of its new runs."""
    if jobs == 1:
        missing: dict[str, str] = {}
        for task in tasks:
            task.missing = missing  # what fails with one seed is not tried with the next
            for name in task.train():
                yield task, [name]
            yield task, []  # what failed, too
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(_trained, task): task for task in tasks}
        for done in concurrent.futures.as_completed(waiting):
            found = done.result()
            yield found, sorted({*waiting[done].todo} & found.histories.keys())


def left_out(plan: TrainingPlan, value: dict[str, Any]) -> int:
    """Returns how many runs of a plan had no time."""
    failed = {*value["missing"]}
    for run in plan.ordered():
        if run.against in failed:  # nothing to be compared with
            failed.add(run.name)
    names = {run.name for run in plan.ordered()} - failed
    return sum(len(names - value["seeds"][str(seed)].keys()) for seed in plan.seeds)


def _trained(task: _Seed) -> _Seed:
    for _ in task.train():
        pass
    return task


@dataclass
class _Seed:
    """The runs of one seed."""

    plan: TrainingPlan
    seed: int
    histories: dict[str, Any]  # by name of a run, of those that are done
    folder: Path
    until: float  # by time.time()
    missing: dict[str, str] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def todo(self) -> list[str]:
        return [run.name for run in self.plan.ordered() if run.name not in self.histories]

    def train(self) -> Iterator[str]:
        """Trains what is to do, and yields the name of each run that is done."""
        device, todo, slowest = self.plan.setup.device, self.todo, 0.0
        needed = {run_of(name).against for name in todo}
        kept: dict[str, States] = {}
        with repeatable(device) as warned, one_thread():
            for run in self.plan.ordered():
                keep, new = run.name in needed, run.name in todo
                other = not run.against or run.against in self.histories
                if not (keep or new) or not other or run.name in self.missing:
                    continue
                before = time.time()
                # The first run is what other studies of the model begin with.
                first = self.seed == self.plan.seeds[0] and not slowest
                if before + slowest > self.until and not first:
                    break
                try:
                    history, states, model = train(
                        self.plan.setup, run, self.seed, kept.get(run.against), keep
                    )
                except Exception as error:  # the other runs still have a result
                    if run.name == "base":
                        raise
                    self.missing[run.name] = first_line_or_kind(error)
                    continue
                if keep:
                    kept[run.name] = states
                if new and run.name == "base" and self.seed == self.plan.seeds[0]:
                    self._save(model)
                slowest = max(slowest, 1.1 * (time.time() - before))
                self.seconds += time.time() - before
                if new:
                    self.histories[run.name] = history
                    yield run.name
                del model, states
        self.warned = list(warned)

    def _save(self, model: torch.nn.Module) -> None:
        """Writes base.pt, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / ".base.pt.part"
        try:
            torch.save(model.state_dict(), part)
            part.replace(self.folder / "base.pt")
        finally:
            part.unlink(missing_ok=True)


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
    """Returns, for each seed, by what share a run changes its counterpart's held-out loss."""
    against = value["runs"].get(name, {}).get("against", "")
    changes: list[float | None] = []
    for seed, history in by_seed(value, name).items():
        other = value["seeds"][seed].get(against, {}).get("probe")
        found = history["probe"]
        changes.append(None if found is None or not other else found / other - 1)
    return changes


def summary(value: dict[str, Any]) -> list[list[str]]:
    """Returns one row per run: distances from the run it is compared with, at the end."""
    rows = []
    for name, run in value["runs"].items():
        histories = by_seed(value, name)
        if not histories:
            continue
        probe = mean_interval([history["probe"] for history in histories.values()])
        loss = probe.shown("{:.4f}".format)
        cells = ["-"] * 4
        if run["against"]:
            cells = [mean_interval(probe_changes(value, name)).shown("{:.2%}".format)]
            for measure in ("l2", "function", "wasserstein"):
                cells.append(str(geometric_interval([h[measure][-1] for h in histories.values()])))
        rows.append([name, str(len(histories)), run["against"] or "-", loss, *cells])
    return rows


SUMMARY_HEADER = [
    "run", "seeds", "against", "held-out loss", "change", "L2 of weights", "function",
    "Wasserstein",
]  # fmt: skip


def printed(value: dict[str, Any]) -> str:
    """Returns the summary as text."""
    lines = [table(SUMMARY_HEADER, summary(value))]
    lines += [f"missing: {name}: {reason}" for name, reason in value["missing"].items()]
    steps = value["configuration"]["steps"]
    lines.append(f"{steps} steps each, {short(value['seconds'])} s of runs in all")
    return "\n".join(lines)
