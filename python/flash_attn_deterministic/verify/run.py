"""One run of verify: tasks, sections, and the report that grows with them."""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import build_info
from . import environment, outcome, report, tasks
from .installed import Installed, Wheel
from .progress import Progress
from .shared.files import finite, write_files
from .shared.provenance import provenance_of
from .supervisor import Supervisor


@dataclass
class Run:
    """What runs, what is installed, and results so far."""

    options: tasks.Options
    out: Path  # folder of the report
    wheel: Wheel | None  # the wheel named, or None
    installed: Installed  # what is known of the installed files
    tasks: Sequence[tasks.Task]  # all tasks, in order
    # by section and task id
    results: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    complete: bool = False  # whether all tasks have ended
    unrendered: str = ""  # why the last report could not be made readable; "": it could
    started: datetime.datetime = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc)
    )
    _begin: float = field(default_factory=time.monotonic)

    def execute(self, supervisor: Supervisor, progress: Progress) -> None:
        """Runs all tasks; writes the report after each.

        Raises:
            ReportError: the report cannot be written.
        """
        self.write()
        for task in self.tasks:
            progress.show(task)
            begin = time.monotonic()

            def on_case(name: str, case: int, total: int, task: tasks.Task = task) -> None:
                progress.show(task, f"{case + 1}/{total}")

            result = supervisor.run(task.section, task.id, on_case)
            self.results[task] = {**result, "seconds": round(time.monotonic() - begin, 3)}
            progress.finish(task, result["status"])
            self.write()
        self.complete = True
        self.write()

    def write(self) -> None:
        """Writes the report as it stands.

        Raises:
            ReportError: it cannot be written.
        """
        texts, self.unrendered = report.render(self.record())
        write_files(self.out, texts)

    def sections(self) -> list[dict[str, Any]]:
        """Returns the sections of the report."""
        return [self._section(name) for name in outcome.SECTIONS]

    def record(self) -> dict[str, Any]:
        """Returns the report; docs/verification.schema.json describes it."""
        sections = self.sections()
        info, installed, wheel = build_info.build_info(), self.installed, self.wheel
        machine = self.results.get(("environment", "environment"), {}).get("data", {})
        capability = machine.get("compute_capability")
        named = None if wheel is None else wheel.record()
        status = outcome.combined(section["status"] for section in sections)
        if not self.complete:
            status = outcome.INCOMPLETE
        elif status != outcome.PASSED:
            status = outcome.FAILED
        record: dict[str, Any] = {
            "schema_version": report.SCHEMA_VERSION,
            "complete": self.complete,
            "quick": self.options.quick,
            "source_tree": installed.source_tree,
            "device": self.options.device,
            "status": status,
            "started": self.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": round(time.monotonic() - self._begin, 1),
            "wheel": {"filename": wheel and wheel.path.name, "sha256": wheel and wheel.sha256},
            "installed": {
                "version": installed.version or None,
                "files": installed.files,
                "matches_wheel": installed.matches_wheel,
                "problems": list(installed.problems),
            },
            "environment": machine,
            "provenance": provenance_of(sys.argv, machine, named),
            "pins": {
                "upstream": {n: getattr(info.upstream, n) for n in ("name", "version", "sha256")},
                "patches": [patch._asdict() for patch in info.upstream.patches],
            },
            "build": {
                "cuda_toolkit": info.cuda_toolkit,
                "architectures": list(info.architectures),
                "deterministic": info.deterministic,
                "bits_version": info.bits_version,
                "sources": dict(info.sources),
                "missing_kernels": environment.missing_kernels(info),
                "golden": _golden(capability),
            },
            "architectures": environment.architectures(
                info.architectures,
                capability,
                force_ptx=os.environ.get("CUDA_FORCE_PTX_JIT") == "1",
            ),
            "sections": sections,
        }
        record = finite(record)
        record["digest"] = report.canonical_digest(record)
        return record

    def _section(self, name: str) -> dict[str, Any]:
        own = [task for task in self.tasks if task.section == name]
        results = {task.id: self.results.get(task, _NOT_RUN) for task in own}
        # Reasons of checks that do not apply are in their rows of the contract alone.
        reasons = [
            result["reason"]
            for result in results.values()
            if result.get("reason") and result["status"] != outcome.NOT_APPLICABLE
        ]
        section: dict[str, Any] = {
            "id": name,
            "title": outcome.SECTIONS[name][0],
            "status": outcome.combined(result["status"] for result in results.values()),
            "reason": "; ".join(reasons) or None,
            "seconds": round(sum(result["seconds"] for result in results.values()), 1),
            "data": {},
        }
        if not results and name == "accuracy":
            section |= {"status": outcome.FAILED, "reason": "the wheel holds none of the kernels"}
        elif not results:
            reason = "measured on a GPU only: the CPU runs the reference, which is exact and slow"
            section |= {"status": outcome.NOT_APPLICABLE, "reason": reason}
        elif name == "environment":
            self._judge_environment(section, results[name]["data"])
        elif name == "contract":
            section["data"] = {"checks": _contract(results)}
        elif name == "accuracy":
            section["data"] = _accuracy(results)
        else:
            section["data"] = results[name]["data"]
        if section["reason"] is None and section["status"] == outcome.FAILED:
            section["reason"] = _why(name, section["data"])
        return section

    def _judge_environment(self, section: dict[str, Any], machine: dict[str, Any]) -> None:
        problems = list(self.installed.problems)
        if section["status"] == outcome.PASSED:
            deterministic = build_info.build_info().deterministic
            problems += environment.problems(self.options.device, machine, deterministic)
        section["data"] = {"problems": problems}
        if problems:
            section["status"] = outcome.FAILED
            section["reason"] = "; ".join(filter(None, [section["reason"], *problems]))


_NOT_RUN: dict[str, Any] = {"status": outcome.NOT_RUN, "data": {}, "seconds": 0.0}


def _golden(capability: str | None) -> dict[str, Any] | None:
    """Returns where the hashes of the row "golden" come from; None: there are none."""
    from .contract.golden import known_entry

    entry = None if capability is None else known_entry(capability)
    return None if entry is None else {"origin": dict(entry.origin), "evidence": entry.evidence}


def _why(name: str, data: Mapping[str, Any]) -> str:
    """Returns in a line what failed in a section that ran to its end."""
    if name == "contract":
        bad = [check for check in data["checks"] if check["failed"]]
        return ", ".join(f"{c['id']}: {c['failed']} of {c['cases']} cases" for c in bad)
    if name == "accuracy":
        return f"{data['failed']} of {data['count']} errors are above the limit"
    return f"not met: {data.get('criterion')}"


def _contract(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each check; one that is not among the tasks is for other devices."""
    from .contract.checks import CHECKS

    nothing = {"cases": 0, "failed": 0, "seconds": 0.0, "by_config": {}}
    rows = []
    for check in CHECKS:
        elsewhere = {"status": outcome.NOT_APPLICABLE, "reason": check.elsewhere, "data": {}}
        result = results.get(check.id, elsewhere)
        of_check = {"id": check.id, "promise": check.promise, "status": result["status"]}
        found = {**nothing, "counter_example": None, "stderr": None, **result["data"]}
        rows.append({**of_check, "reason": result.get("reason"), **found})
    return rows


_SHOWN = 100  # failed errors that a report lists


def _accuracy(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the worst error of each head dim, dtype and tensor, those that failed, and counts."""
    found = [result["data"] for result in results.values() if result["data"].get("rows")]
    rows = [row for data in found for row in data["rows"]]
    failed = [row for row in rows if not row["passed"]]
    by_tensor = _worst(rows, "head_dim", "dtype", "direction", "tensor").values()
    kept = [*by_tensor, *(row for row in failed[:_SHOWN] if row not in by_tensor)]
    by_direction = {key: row for (key,), row in _worst(rows, "direction").items()}
    words = ("name", "head_dim", "dtype", "ratio")
    return {
        "count": len(rows),
        "failed": len(failed),
        "rows": kept,
        "worst": {key: {n: row[n] for n in words} for key, row in by_direction.items()},
        "by_feature": {key: row["ratio"] for (key,), row in _worst(rows, "feature").items()},
        "by_form": {key: row["ratio"] for (key,), row in _worst(rows, "form").items()},
        "standard": found[0]["standard"] if found else None,
        "criterion": found[0]["criterion"] if found else None,
    }


def _worst(rows: Sequence[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns the row with the highest ratio for each choice of some fields."""
    worst: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        if key not in worst or _height(row) > _height(worst[key]):
            worst[key] = row
    return worst


def _height(row: Mapping[str, Any]) -> float:
    """Returns what to order by: a ratio that is no number is above all."""
    ratio = float(row["ratio"])
    return ratio if math.isfinite(ratio) else math.inf
