"""The pieces that a run consists of: each runs in the worker, and can fail on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import outcome
from .contract.sizes import Config, size_of

# id to title, in the order of the report.
SECTIONS = {
    "environment": "Environment",
    "contract": "Contract",
    "accuracy": "Accuracy against float64",
    "memory": "Memory",
    "performance": "Performance",
    "batch-invariance": "Batch invariance, 8 against 4 + 4",
    "scaling": "Scaling",
    "decode": "Decode",
    "backward": "Backward",
}
CUDA_ONLY = ("memory", "performance", "scaling", "decode", "backward")

OnCase = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """What holds for all tasks of a run.

    Args:
        device: "cpu" or "cuda".
        quick: the smaller run.
        baseline: library of upstream's own kernels; None: not there.
    """

    device: str
    quick: bool
    baseline: str | None = None


@dataclass(frozen=True)
class Task:
    """One piece of a section.

    Args:
        section: id of the section.
        id: unique within it.
        weight: seconds it takes, roughly; for the progress bar.
    """

    section: str
    id: str
    weight: float

    @property
    def name(self) -> str:
        """Returns e.g. "contract: batch"."""
        title = self.section if self.id == self.section else f"{self.section}: {self.id}"
        return title


# Seconds of each contract check: (cpu quick, cpu full, cuda quick, cuda full).
_CONTRACT_SECONDS = {
    "run-to-run": (1, 15, 6, 20),
    "batch": (2, 40, 5, 18),
    "chunk": (1, 15, 2, 8),
    "decode": (1, 15, 2, 8),
    "capacity": (4, 60, 4, 14),
    "paged": (1, 20, 4, 16),
    "varlen": (1, 20, 2, 8),
    "heads": (1, 20, 2, 6),
    "schedule": (0, 0, 8, 30),
    "family": (0, 0, 5, 15),
    "split-size": (1, 3, 1, 3),
    "backward": (4, 80, 8, 40),
    "dropout": (2, 20, 1, 3),
    "golden": (0, 0, 3, 8),
}
_OTHER_SECONDS = {
    "environment": (1, 1, 4, 4),
    "memory": (0, 0, 1, 1),
    "performance": (0, 0, 1, 2),
    "batch-invariance": (1, 1, 1, 1),
    "scaling": (0, 0, 3, 6),
    "decode": (0, 0, 5, 15),
    "backward": (0, 0, 3, 8),
}
_ACCURACY_SECONDS = (1, 1, 1, 2)  # of one config


def list_tasks(device: str, quick: bool, held: Callable[[Config], bool]) -> list[Task]:
    """Lists the tasks of a run, in order.

    Args:
        device: "cpu" or "cuda".
        quick: the smaller run.
        held: whether the wheel can run a config on the device.
    """
    from .contract.checks import CHECKS

    column = 2 * (device == "cuda") + (not quick)
    tasks = []
    for section in SECTIONS:
        if section == "contract":
            tasks += [
                Task(section, check.id, _CONTRACT_SECONDS[check.id][column])
                for check in CHECKS
                if device in check.devices
            ]
        elif section == "accuracy":
            tasks += [
                Task(section, f"{head_dim} {dtype}", _ACCURACY_SECONDS[column])
                for head_dim, dtype in size_of(device, quick, held).configs
            ]
        elif device == "cuda" or section not in CUDA_ONLY:
            tasks.append(Task(section, section, _OTHER_SECONDS[section][column]))
    return tasks


def holds(device: str) -> Callable[[Config], bool]:
    """Returns what tells whether the installed wheel can run a config on a device."""
    from ..info.build_info import build_info

    info = build_info()
    instances = {(i.dtype, i.head_dim) for i in info.instances if i.direction == "fwd"}

    def held(config: Config) -> bool:
        head_dim, dtype = config
        return device == "cpu" or (dtype, info.kernel_head_dim(head_dim)) in instances

    return held


def execute(section: str, task_id: str, options: Options, on_case: OnCase) -> dict[str, Any]:
    """Runs one task, in the worker.

    Args:
        section: id of the section.
        task_id: id of the task in it.
        options: of the run.
        on_case: told of each case: its name, number and how many there are.

    Returns:
        `status`, `data`, and `broken`: whether the process can't go on.
    """
    from .contract.attention import Attention

    attention = Attention.installed()
    device, quick = options.device, options.quick
    if section == "environment":
        from .environment import collect

        return _result(True, collect(device))
    if section == "contract":
        return _contract(task_id, device, quick, attention, on_case)
    if section == "accuracy":
        from . import accuracy

        head_dim, dtype = task_id.split()
        data = accuracy.measure((int(head_dim), dtype), device, attention)
        return _result(all(row["passed"] for row in data["rows"]), data)

    from .speed import backward, decode, seed
    from .speed.upstream import Baseline

    baseline = None if options.baseline is None else Baseline(Path(options.baseline))
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": lambda: seed.memory(attention, baseline),
        "performance": lambda: seed.performance(attention, baseline, quick),
        "batch-invariance": lambda: seed.batch_invariance(attention, baseline, device),
        "scaling": lambda: seed.scaling(attention, baseline, quick),
        "decode": lambda: decode.measure(attention, baseline, quick),
        "backward": lambda: backward.measure(attention, baseline, quick),
    }
    data = measured[section]()
    return _result(bool(data["passed"]), data)


def _contract(
    check_id: str, device: str, quick: bool, attention: Any, on_case: OnCase
) -> dict[str, Any]:
    import dataclasses

    from .contract import CHECKS, run_check

    (check,) = (one for one in CHECKS if one.id == check_id)
    size = size_of(device, quick, holds(device))
    reason = check.unavailable(size)
    if reason:
        return {
            "status": outcome.NOT_APPLICABLE,
            "data": {},
            "reason": reason,
            "broken": False,
        }
    found = run_check(
        check, size, attention, lambda case, number, total: on_case(case.name, number, total)
    )
    data = dataclasses.asdict(found)
    broken = bool(data.pop("broken"))
    return {**_result(found.failed == 0 and found.cases > 0, data), "broken": broken}


def _result(passed: bool, data: dict[str, Any]) -> dict[str, Any]:
    status = outcome.PASSED if passed else outcome.FAILED
    return {"status": status, "data": data, "broken": False}
