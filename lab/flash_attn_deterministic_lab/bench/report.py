"""The results of bench as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..shared.document import Document, Section, markdown
from ..shared.files import finite, json_text, write_files

_READING = "reading keys and values"


def _title(record: Mapping[str, Any], name: str) -> str:
    return str(record["titles"].get(name, _READING))


def _times(record: Mapping[str, Any]) -> list[list[str]]:
    """Returns shape, attention, milliseconds, ratio to the first and memory; or a reason."""
    found = []
    for case in record["cases"]:
        for name, ms in case["ms"].items():
            spread = "{median:.3g} ({p10:.3g} to {p90:.3g})".format(**ms)
            relative = f"{case['ratio'][name]:.2f}x" if name in case["ratio"] else ""
            peak = case["peak_bytes"].get(name)
            memory = "" if peak is None else f"{peak / 1e6:.1f} MB"
            found.append([case["name"], _title(record, name), spread, relative, memory])
        for name, reason in case["failed"].items():
            found.append([case["name"], _title(record, name), f"- {reason}", "", ""])
    return found


def _summary(record: Mapping[str, Any]) -> Section:
    """Returns our time over others' by group: mean (worst)."""
    names = dict.fromkeys(name for own in record["summary"].values() for name in own)
    order = sorted(names, key=lambda name: (name != "best", list(names).index(name)))
    table = []
    for group, own in record["summary"].items():
        cells = [own.get(name) for name in order]
        table.append([group, *("-" if c is None else f"{c['mean']:.2f} ({c['worst']:.2f})"
                               for c in cells)])  # fmt: skip
    titles = ["the best" if name == "best" else _title(record, name) for name in order]
    every = record["summary"].get("all", {})
    worst = [
        f"the worst beside {title}: {every[name]['worst_case']}"
        for name, title in zip(order, titles, strict=True)
        if name in every
    ]
    words = "Our time over theirs, geometric mean (worst)."
    return Section("Summary", words, worst, header=["", *titles], rows=table)


def document(record: Mapping[str, Any]) -> Document:
    """Returns the results as a document."""
    hardware, versions = record["hardware"], record["versions"]
    where = hardware["gpu"] or f"CPU, {hardware['cpus']} cores"
    notice = "" if record["complete"] else "Incomplete: what is missing was not measured. "
    intro = (
        f"{notice}{where}, torch {versions['torch']}, {record['date']}. Median (10th to 90th "
        "percentile) of calls in turns."
    )
    header = ("shape", "attention", "ms", "time over the first", "peak memory")
    times = Section("Times", header=header, rows=_times(record))
    return Document(f"Benchmark: {record['study']}", intro, (_summary(record), times))


def write(folder: Path, record: Mapping[str, Any]) -> str:
    """Writes STUDY.json and .md, and returns the text of the latter."""
    name, record = record["study"], finite(record)
    text = markdown(document(record), folder)
    write_files(folder, {f"{name}.json": json_text(record), f"{name}.md": text})
    return text
