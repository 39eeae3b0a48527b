"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import tables
from .tables import MARKS, Table

_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def markdown(record: Mapping[str, Any]) -> str:
    """Returns a report as Markdown, with the tables of its HTML form and no plots."""
    return "\n".join(_lines(record)) + "\n"


def notices(record: Mapping[str, Any]) -> list[str]:
    """Returns what a reader must know before the results."""
    found = []
    if not record["complete"]:
        found.append("Incomplete: the run did not come to its end. What is missing is marked so.")
    if record["quick"]:
        found.append("Quick run: fewer head dims and shapes. Not enough to publish a wheel.")
    if record["source_tree"]:
        found.append("Ran on a source tree, not on an installed wheel.")
    elif record["installed"]["matches_wheel"] is None:
        found.append("No wheel was named: the report is bound to no file.")
    if record["device"] == "cpu":
        found.append("Ran on the CPU: none of the wheel's GPU code was verified.")
    elif record["architectures"]["unverified"]:
        names = ", ".join(record["architectures"]["unverified"])
        found.append(f"Not verified, because it does not run on this GPU: {names}.")
    # Reports of earlier versions do not have them.
    missing = record["build"].get("missing_kernels", [])
    if missing and record["device"] == "cuda":
        found.append(f"Not in the wheel, and so not tested: {_kernels(missing)}.")
    for check in tables.section_of(record, "contract")["data"].get("checks", []):
        if record["device"] == "cuda" and (check["id"], check["status"]) == (
            "golden",
            "not-applicable",
        ):
            found.append(f"Not compared with earlier wheels: {check['reason']}.")
    return found


def _kernels(missing: Sequence[Mapping[str, Any]]) -> str:
    """Names kernels as the command info does: direction and dtype, then head dims."""
    head_dims: dict[str, list[str]] = {}
    for one in missing:
        kind = f"{_DIRECTIONS[one['direction']]} {one['dtype']}"
        head_dims.setdefault(kind, []).append(str(one["head_dim"]))
    return "; ".join(f"{kind}, head_dim up to: {', '.join(n)}" for kind, n in head_dims.items())


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"# Verification: {MARKS[record['status']]}"
    yield ""
    for notice in notices(record):
        yield f"- {notice}"
    yield ""
    for title, value, text, status in tables.headline(record):
        yield f"- **{title}: {value}** ({text}) - {MARKS[status]}"
    yield ""
    yield from _table(tables.sections(record))
    for reason in tables.reasons(record):
        yield f"- {_escaped(reason)}"
    yield ""
    yield "## Contract"
    yield ""
    yield from _table(tables.contract(record))
    yield from _table(tables.promises(record))
    for check in tables.section_of(record, "contract")["data"].get("checks", []):
        if check["counter_example"] is not None:
            yield f"### First counter-example of {check['id']}"
            yield ""
            yield from _table(tables.counter_example(check))
        elif check["reason"] and check["status"] not in ("not-applicable", "not-run"):
            yield f"{check['id']}: {_escaped(check['reason'])}"
            yield ""
    for name, table in measured(record).items():
        section = tables.section_of(record, name)
        yield f"## {section['title']}"
        yield ""
        if table.rows:
            yield from _table(table)
        for text in (section["data"].get("criterion"), section["reason"]):
            if text:
                yield f"{_escaped(text)}"
                yield ""
    yield "## What ran where"
    yield ""
    yield from _table(tables.facts(record))
    yield from _table(tables.architectures(record))


def measured(record: Mapping[str, Any]) -> dict[str, Table]:
    """Returns the tables of the sections that measure, by id, in order."""
    found: dict[str, Table] = {"accuracy": tables.accuracy(record)}
    for name in ("memory", "performance"):
        found[name] = tables.seed(tables.section_of(record, name))
    found["batch-invariance"] = tables.invariance(tables.section_of(record, "batch-invariance"))
    found["scaling"] = tables.seed(tables.section_of(record, "scaling"))
    for name in ("decode", "backward"):
        found[name] = tables.timed(tables.section_of(record, name))
    return found


def _table(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(map(_escaped, table.header)) + " |"
    marks = ["---:" if i >= table.numbers else "---" for i in range(len(table.header))]
    yield "| " + " | ".join(marks) + " |"
    for row in table.rows:
        yield "| " + " | ".join(map(_escaped, row)) + " |"
    yield ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
