"""The tasks of a run: each runs in the worker, and one that fails does not stop the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import outcome
from .contract.sizes import Config, size_of

CUDA_ONLY = ("forward", "decode", "backward")

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
    from .contract.checks import CHECKS

    device = options.device
    configs = size_of(device, options.quick, held).configs
    ids = {
        "contract": [check.id for check in CHECKS if device in check.devices],
        "accuracy": [f"{head_dim} {dtype}" for head_dim, dtype in configs],
    }
    return [
        Task(section, task_id)
        for section in outcome.SECTIONS
        if device == "cuda" or section not in CUDA_ONLY
        for task_id in ids.get(section, [section])
    ]


def holds(device: str) -> Callable[[Config], bool]:
    """Returns a function: whether the installed wheel can run a config on a device."""
    from ..checks.kernels import instance_problem
    from .contract.call import DTYPES

    def held(config: Config) -> bool:
        head_dim, dtype = config
        return device == "cpu" or not instance_problem(DTYPES[dtype], head_dim, "fwd")

    return held


def execute(section: str, task_id: str, options: Options, on_case: OnCase) -> dict[str, Any]:
    """Runs one task of a section, in the worker; `on_case` is told each case.

    Returns `status`, `data`, and `broken`: whether the process can't go on.
    """
    from .contract.call import Attention

    attention = Attention.installed()
    device, quick = options.device, options.quick
    if section == "environment":
        from .shared.provenance import machine

        return _result(True, machine(device))
    if section == "contract":
        return _contract(task_id, device, quick, attention, on_case)
    if section == "accuracy":
        from . import accuracy

        head_dim, dtype = task_id.split()
        data = accuracy.measure((int(head_dim), dtype), device, attention)
        return _result(all(row["passed"] for row in data["rows"]), data)

    from .speed import measure

    data = measure(section, attention, quick)
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
        return {**_result(True, {}), "status": outcome.NOT_APPLICABLE, "reason": reason}
    found = run_check(
        check, size, attention, lambda case, number, total: on_case(case.name, number, total)
    )
    data = dataclasses.asdict(found)
    broken = bool(data.pop("broken"))
    return {**_result(found.failed == 0 and found.cases > 0, data), "broken": broken}


def _result(passed: bool, data: dict[str, Any]) -> dict[str, Any]:
    status = outcome.PASSED if passed else outcome.FAILED
    return {"status": status, "data": data, "broken": False}
