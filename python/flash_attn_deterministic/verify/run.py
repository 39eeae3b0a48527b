"""One run of verify: tasks, sections, and the report that grows with them."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import build_info
from . import environment, outcome, report
from .contract import CHECKS, Outcome
from .contract.golden import known_entry
from .installed import Installed, Wheel
from .shared.files import finite, write_files
from .shared.provenance import provenance_of
from .supervisor import Supervisor
from .tasks import Options, Task


@dataclass
class Run:
    """What runs, what is installed, and results so far."""

    options: Options
    out: Path  # folder of the report
    wheel: Wheel | None  # the wheel named, or None
    installed: Installed  # what is known of the installed files
    machine: Mapping[str, Any]  # of `shared.provenance`
    tasks: Sequence[Task]  # all tasks, in order
    results: dict[Task, dict[str, Any]] = field(default_factory=dict)
    complete: bool = False  # whether all tasks have ended
    unrendered: str = ""  # why the last report could not be made readable; "": it could
    started: datetime.datetime = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc)
    )
    _begin: float = field(default_factory=time.monotonic)

    def execute(self, supervisor: Supervisor) -> None:
        """Runs all tasks, a line on stderr for each; writes the report after each.

        Raises:
            ReportError: the report cannot be written.
        """
        terminal = sys.stderr.isatty()
        begin_of_line = "\r\x1b[K" if terminal else ""
        self.write()
        for number, task in enumerate(self.tasks, 1):
            words, begin = f"{number}/{len(self.tasks)}  {task.name}", time.monotonic()

            def on_case(name: str, case: int, total: int, words: str = words) -> None:
                if terminal:
                    line = f"{begin_of_line}{words} {case + 1}/{total}"
                    print(line, end="", file=sys.stderr, flush=True)

            result = supervisor.run(task, on_case)
            self.results[task] = {**result, "seconds": round(time.monotonic() - begin, 3)}
            print(f"{begin_of_line}{words}: {result['status']}", file=sys.stderr, flush=True)
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
        info, machine, wheel = build_info.build_info(), self.machine, self.wheel
        capability, named = machine["compute_capability"], wheel.record() if wheel else None
        installed = {**asdict(self.installed), "version": self.installed.version or None}
        status = outcome.combined(section["status"] for section in sections)
        if not self.complete:
            status = outcome.INCOMPLETE
        elif status != outcome.PASSED:
            status = outcome.FAILED
        record: dict[str, Any] = {
            "schema_version": report.SCHEMA_VERSION,
            "complete": self.complete,
            "quick": self.options.quick,
            "source_tree": installed.pop("source_tree"),
            "device": self.options.device,
            "status": status,
            "started": self.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": round(time.monotonic() - self._begin, 1),
            "wheel": {"filename": wheel and wheel.path.name, "sha256": wheel and wheel.sha256},
            "installed": installed,
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
        results = {t.id: self.results.get(t, _NOT_RUN) for t in self.tasks if t.section == name}
        # Reasons of checks that do not apply are in their rows of the contract alone.
        reasons = [
            result["reason"]
            for result in results.values()
            if result.get("reason") and result["status"] != outcome.NOT_APPLICABLE
        ]
        status = outcome.combined(result["status"] for result in results.values())
        data: Mapping[str, Any] = {}
        if name == "environment":
            deterministic = build_info.build_info().deterministic
            found = environment.problems(self.options.device, self.machine, deterministic)
            reasons = [*self.installed.problems, *found]
            status, data = outcome.FAILED if reasons else outcome.PASSED, {"problems": reasons}
        elif name == "contract":
            data = {"checks": _contract(results)}
        elif name == "accuracy":
            data = _accuracy(results)
            if not results:
                status, reasons = outcome.FAILED, ["the wheel holds none of the kernels"]
        elif results:
            data = results[name]["data"]
        else:
            reasons = [
                "measured on a GPU only: the CPU runs the reference, which is exact and slow"
            ]
            status = outcome.NOT_APPLICABLE
        if status == outcome.FAILED and not reasons:
            reasons = [_why(name, data)]
        return {
            "id": name,
            "title": outcome.SECTIONS[name][0],
            "status": status,
            "reason": "; ".join(reasons) or None,
            "seconds": round(sum(result["seconds"] for result in results.values()), 1),
            "data": data,
        }


_NOT_RUN: dict[str, Any] = {"status": outcome.NOT_RUN, "data": {}, "seconds": 0.0}


def _golden(capability: str | None) -> dict[str, Any] | None:
    """Returns where the hashes of the row "golden" come from; None: there are none."""
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
    """Returns a row for each check."""
    nothing = {**asdict(Outcome()), "stderr": None}
    rows = []
    for check in CHECKS:
        result = results[check.id]
        said = {name: result.get(name) for name in ("status", "reason", "seconds")}
        rows.append({"id": check.id, "promise": check.promise, **said, **nothing, **result["data"]})
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
        if key not in worst or row["ratio"] > worst[key]["ratio"]:  # none is a NaN: see bounds
            worst[key] = row
    return worst
