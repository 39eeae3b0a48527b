"""The results of bench: a document, and text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..shared.document import Document, Section, markdown
from ..shared.files import finite, json_text, write_files

_READING = "reading keys and values"


def _title(record: Mapping[str, Any], name: str) -> str:
    return str(record["titles"].get(name, _READING))


def rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns shape, attention, milliseconds, ratio to the first and memory; or a reason."""
    found: list[tuple[str, ...]] = []
    for case in record["cases"]:
        for name, ms in case["ms"].items():
            spread = "{median:.3g} ({p10:.3g} to {p90:.3g})".format(**ms)
            relative = f"{case['ratio'][name]:.2f}x" if name in case["ratio"] else ""
            peak = case["peak_bytes"].get(name)
            memory = "" if peak is None else f"{peak / 1e6:.1f} MB"
            found.append((case["name"], _title(record, name), spread, relative, memory))
        for name, reason in case["failed"].items():
            found.append((case["name"], _title(record, name), f"- {reason}", "", ""))
    return found


def summary_rows(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of our time over others' by group: mean (worst)."""
    names = dict.fromkeys(name for own in record["summary"].values() for name in own)
    order = sorted(names, key=lambda name: (name != "best", list(names).index(name)))
    table = []
    for group, own in record["summary"].items():
        cells = [own.get(name) for name in order]
        table.append([group, *("-" if c is None else f"{c['mean']:.2f} ({c['worst']:.2f})"
                               for c in cells)])  # fmt: skip
    header = ["", *("the best" if name == "best" else _title(record, name) for name in order)]
    return header, table


def document(record: Mapping[str, Any]) -> Document:
    """Returns the results as a document."""
    header, means = summary_rows(record)
    words = "Our time over theirs, geometric mean (worst)."
    every = ("shape", "attention", "ms", "time over the first", "peak memory")
    sections = (
        Section("Summary", words, header=header, rows=means),
        Section("Times", header=every, rows=rows(record)),
    )
    return Document(f"Benchmark: {record['study']}", machine(record), sections)


def machine(record: Mapping[str, Any]) -> str:
    """Returns in words what was measured on."""
    hardware, versions = record["hardware"], record["versions"]
    where = hardware["gpu"] or f"CPU, {hardware['cpus']} cores"
    notice = "" if record["complete"] else "Incomplete: what is missing was not measured. "
    return (
        f"{notice}{where}, torch {versions['torch']}, {record['date']}. Median (10th to 90th "
        "percentile) of calls in turns."
    )


def text(record: Mapping[str, Any]) -> str:
    """Returns the results for a terminal: a block for each shape."""
    lines = [machine(record)]
    last = ""
    for shape, name, time, relative, memory in rows(record):
        if shape != last:
            lines += ["", shape]
            last = shape
        lines.append(f"  {name:<34} {time:<28} {relative:>7} {memory:>12}".rstrip())
    for group, own in record["summary"].items():
        if group == "all":
            lines += ["", "our time over theirs, geometric mean, worst:"]
            lines += [f"  {_title(record, name) if name != 'best' else 'the best':<34} "
                      f"{one['mean']:.2f} {one['worst']:.2f} ({one['worst_case']})"
                      for name, one in own.items()]  # fmt: skip
    return "\n".join(lines)


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes STUDY.json and .md."""
    name, record = record["study"], finite(record)
    files = {f"{name}.json": json_text(record), f"{name}.md": markdown(document(record), folder)}
    write_files(folder, files)
