"""The report: one record, written as JSON, and as a document in Markdown and HTML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..checks.kernels import DIRECTIONS
from ..info.collect import head_dims_of
from .shared.document import Document, Section, html, markdown
from .shared.files import json_text

SCHEMA_VERSION = 2
NAMES = ("verification.json", "verification.md", "verification.html")
MARKS = {
    "passed": "✓ passed",
    "failed": "✗ failed",
    "error": "✗ error",
    "not-applicable": "- not applicable",
    "not-run": "… not run",
    "incomplete": "… incomplete",
}
_CLASSES = {"passed": "yes", "failed": "no", "error": "no"}  # of a mark in the style sheet
Record = Mapping[str, Any]


def canonical_digest(record: Record) -> str:
    """Returns the sha256 over a report without its digest, as canonical JSON.

    It detects accidental changes of a file, not tampering: against that stands the attestation of
    the build.
    """
    rest = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def render(record: Record) -> tuple[dict[str, str], str]:
    """Returns the text of each file, and why the readable ones could not be made ("": they were).

    Results that took a GPU minutes must not be lost to an error in a table: the JSON file then
    holds them, and the others name the error.
    """
    data, page, web = NAMES
    texts = {data: json_text(record)}
    try:
        found = document(record)
        texts |= {page: markdown(found, Path()), web: html(found)}
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        words = f"This page could not be made ({why}). The results are in {data}."
        return {**texts, page: f"{words}\n", web: f"<!doctype html>\n<p>{escape(words)}</p>\n"}, why
    return texts, ""


def document(record: Record) -> Document:
    """Returns a report: the verdict and what must be known first, then a part for each section."""
    device = record["environment"].get("gpu") or "CPU"
    wheel = record["wheel"]["filename"] or "the installed package, no wheel named"
    intro = [f"Verification of {wheel} on {device}, {record['started'][:10]}.", *notices(record)]
    parts: list[Section] = []
    for section in record["sections"]:
        words = (section["reason"], section["data"].get("criterion"))
        table = _TABLES.get(section["id"])
        header, rows = table(section["data"]) if table else ((), ())
        part = Section(
            title=section["title"],
            text=" · ".join(filter(None, words)),
            header=header,
            rows=rows,
            key=section["id"],
            source=f"{section['seconds']:.0f} s",
            verdict=MARKS[section["status"]],
            mark=_CLASSES.get(section["status"], "none"),
        )
        parts.append(part)
        if section["id"] == "contract":
            parts += _details(section["data"].get("checks", []))
    parts.append(Section("What ran where", header=("", ""), rows=list(_facts(record))))
    title = f"{MARKS[record['status']]}: flash-attn-deterministic"
    return Document(title, " ".join(intro), parts, ("section", "took", "result"))


def notices(record: Record) -> list[str]:
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
        return [*found, "Ran on the CPU: none of the wheel's GPU code was verified."]
    if record["architectures"]["unverified"]:
        names = ", ".join(record["architectures"]["unverified"])
        found.append(f"Not verified, because it does not run on this GPU: {names}.")
    missing: dict[str, list[int]] = {}
    for one in record["build"]["missing_kernels"]:
        kind = f"{DIRECTIONS[one['direction']]} {one['dtype']}"
        missing.setdefault(kind, []).append(one["head_dim"])
    if missing:
        kinds = (f"{kind}, {head_dims_of(own)}" for kind, own in missing.items())
        found.append(f"Not in the wheel, and so not tested: {'; '.join(kinds)}.")
    for section in record["sections"]:
        for check in section["data"].get("checks", []):
            if (check["id"], check["status"]) == ("golden", "not-applicable"):
                found.append(f"Not compared with earlier wheels: {check['reason']}.")
    return found


# --- tables: a header, and rows of as many words ------------------------------------------------

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def _contract(data: Record) -> Table:
    """Rows are checks, columns are head dims with dtypes."""
    checks = data.get("checks", [])
    configs = list(dict.fromkeys(name for check in checks for name in check["by_config"]))
    rows = [
        (
            check["id"],
            MARKS[check["status"]],
            str(check["cases"]),
            *(_cell(check["by_config"].get(name)) for name in configs),
        )
        for check in checks
    ]
    return ("row", "result", "cases", *configs), rows


def _cell(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return ""
    if counts["failed"]:
        return f"✗ {counts['failed']}/{counts['cases']}"
    return f"✓ {counts['cases']}"


def _details(checks: Iterable[Record]) -> Iterator[Section]:
    """Yields what the rows promise, and what is wrong with those that did not pass."""
    rows = [(c["id"], c["promise"], c["reason"] or "") for c in checks]
    header = ("row", "the same bits whatever", "")
    yield Section("What the rows promise", header=header, rows=rows)
    for check in checks:
        if check["counter_example"] is not None:
            title = f"First counter-example of {check['id']}"
            yield Section(title, header=("", ""), rows=list(_leaves(check["counter_example"])))
        elif check["status"] == "error":
            words = filter(None, (check["reason"], check["stderr"]))
            yield Section(f"{check['id']}: no result", items=list(words))


def _accuracy(data: Record) -> Table:
    """The worst row of each head dim, dtype and tensor, those that failed, and of each feature."""
    rows = [
        (
            str(row["head_dim"]),
            row["dtype"],
            row["tensor"],
            row["name"].split(" ", 2)[2],
            _number(row["ours"]["largest"], ".1e"),
            "" if row["standard"] is None else _number(row["standard"]["largest"], ".1e"),
            ("" if row["passed"] else "✗ ") + _number(row["ratio"], ".2f"),
        )
        for row in data.get("rows", [])
    ]
    for kind in ("feature", "form"):
        found = data.get(f"by_{kind}", {})
        rows += [("all", "", kind, name, "", "", _number(x, ".2f")) for name, x in found.items()]
    return ("head dim", "dtype", "tensor", "worst call", "ours", "torch", "of what passes"), rows


def _times(data: Record) -> Table:
    rows = []
    for row in data.get("rows", []):
        passed = row["time_passed"] and row["memory_passed"]
        cells = [
            row["shape"],
            *(_milliseconds(row["ms"][side]) for side in ("ours", "standard")),
            ("" if passed else "✗ ") + _number(row["time_ratio"], ".3f"),
            "" if row["last_ratio"] is None else _number(row["last_ratio"], ".3f"),
            "none" if row["limit"] is None else _number(row["limit"], ".3f"),
            _number(row["memory_ratio"], ".3f") if "memory_ratio" in row else "",
            _number(row["ratio_to_floor"], ".2f") if "ratio_to_floor" in row else "",
        ]
        rows.append(cells)
    header = ("shape", "ours, ms", "torch, ms", "time", "last release", "limit", "memory")
    return (*header, "to reading the cache"), rows


_TABLES = {
    "contract": _contract,
    "accuracy": _accuracy,
    **dict.fromkeys(("forward", "decode", "backward"), _times),
}


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    """What was verified, where; kernels that are missing are named above."""
    build = {name: value for name, value in record["build"].items() if name != "missing_kernels"}
    names = ("wheel", "installed", "pins", "architectures", "environment", "started", "seconds")
    yield from _leaves({**{name: record[name] for name in names}, "build": build})
    yield "digest of the report", record.get("digest", "")


def _leaves(value: Any, *names: str) -> Iterator[tuple[str, str]]:
    """Yields all that a record holds, each with the names that lead to it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, *names, name.replace("_", " "))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for item in value:
            yield from _leaves(item, *names)
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        yield " ".join(names), "-" if text in (None, "") else str(text)


def _number(value: float | None, spec: str) -> str:
    """Says a number; None stands for one that JSON does not have (NaN, Inf)."""
    return "not finite" if value is None else format(value, spec)


def _milliseconds(time: Mapping[str, float | None]) -> str:
    """Returns e.g. "3.36 (3.34 to 3.70)": median, 10th and 90th percentile."""
    median, low, high = (_number(time[name], ".3g") for name in ("median", "p10", "p90"))
    return f"{median} ({low} to {high})"
