"""The tasks of a run: each runs in the worker, and one that fails does not stop the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..checks.kernels import instance_problem
from . import accuracy, outcome, speed
from .contract import CHECKS, Attention, run_check, size_of
from .contract.call import DTYPES
from .contract.sizes import Config

TIMED = tuple(speed.SHAPES)  # sections that measure a GPU

OnCase = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """Options of all tasks of a run."""

    device: str  # "cpu" or "cuda"
    quick: bool  # the smaller run


class Task(NamedTuple):
    """One piece of a section."""

    section: str  # id of the section
    id: str  # unique within it

    @property
    def name(self) -> str:
        """Returns e.g. "contract: batch"."""
        return self.section if self.id == self.section else f"{self.section}: {self.id}"


def list_tasks(options: Options, held: Callable[[Config], bool]) -> list[Task]:
    """Lists the tasks of a run, in order, of configs that the wheel can run."""
    size = size_of(options.device, options.quick, held)
    configs = (*size.configs, *size.latent)
    ids = {
        "contract": [check.id for check in CHECKS],
        "accuracy": [f"{head_dim} {dtype}" for head_dim, dtype in configs],
    }
    if options.device == "cuda":
        ids |= {section: [section] for section in TIMED}
    return [Task(section, task_id) for section, own in ids.items() for task_id in own]


def holds(device: str) -> Callable[[Config], bool]:
    """Returns a function: whether the installed wheel can run a config on a device."""

    def held(config: Config) -> bool:
        head_dim, dtype = config
        return device == "cpu" or not instance_problem(DTYPES[dtype], head_dim, "fwd")

    return held


def execute(task: Task, options: Options, on_case: OnCase) -> dict[str, Any]:
    """Runs one task, in the worker; `on_case` is told name, number and total before each case.

    Returns `status`, `data` and, of a check that cannot decide, `reason`.
    """
    attention, device = Attention.installed(), options.device
    if task.section == "contract":
        return _contract(task.id, options, attention, on_case)
    if task.section == "accuracy":
        head_dim, dtype = task.id.split()
        data = accuracy.measure((int(head_dim), dtype), device, attention)
        return _result(all(row["passed"] for row in data["rows"]), data)
    data = speed.measure(task.section, attention, options.quick)
    return _result(bool(data["passed"]), data)


def _contract(
    check_id: str, options: Options, attention: Attention, on_case: OnCase
) -> dict[str, Any]:
    (check,) = (one for one in CHECKS if one.id == check_id)
    size = size_of(options.device, options.quick, holds(options.device))
    if reason := check.unavailable(size):
        return {"status": outcome.NOT_APPLICABLE, "data": {}, "reason": reason}
    found = run_check(
        check, size, attention, lambda case, number, total: on_case(case.name, number, total)
    )
    return _result(found.failed == 0 and found.cases > 0, asdict(found))


def _result(passed: bool, data: dict[str, Any]) -> dict[str, Any]:
    return {"status": outcome.PASSED if passed else outcome.FAILED, "data": data}
