"""The results of bench as a table, Markdown and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verify.report.markdown import table_lines
from ..verify.report.numbers import milliseconds, ratio, short, size
from ..verify.report.svg import Bar, bars_file
from ..verify.report.tables import Table
from .peers import PEERS, VARIANTS

_TITLES = {peer.name: peer.title for peer in (*PEERS, *VARIANTS)}


def rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns shape, peer, milliseconds, ratio to ours and memory; a reason where it failed."""
    found: list[tuple[str, ...]] = []
    for case in record["cases"]:
        for name, time in case["ms"].items():
            relative = ratio(case["ratio"][name]) if name in case["ratio"] else ""
            memory = size(case["peak_bytes"][name]) if name in case["peak_bytes"] else ""
            found.append((case["name"], _TITLES[name], milliseconds(time), relative, memory))
        for name, reason in case["failed"].items():
            found.append((case["name"], _TITLES[name], f"- {reason}", "", ""))
    return found


HEADER = ("shape", "implementation", "ms", "of ours", "peak memory")


def markdown(record: Mapping[str, Any]) -> str:
    """Returns the results as Markdown."""
    table = table_lines(Table(HEADER, tuple(rows(record)), 2))
    return "\n".join(["# Benchmark", "", *_notice(record), _machine(record), "", *table]) + "\n"


def text(record: Mapping[str, Any]) -> str:
    """Returns the results for a terminal: a block for each shape."""
    lines = [*_notice(record), _machine(record)]
    last = ""
    for shape, peer, time, relative, memory in rows(record):
        if shape != last:
            lines += ["", shape]
            last = shape
        lines.append(f"  {peer:<30} {time:<30} {relative:>7} {memory:>12}".rstrip())
    return "\n".join(lines)


def plot(record: Mapping[str, Any]) -> str:
    """Returns an SVG file: each peer's time over ours, shape by shape."""
    bars = []
    for case in record["cases"]:
        for name, relative in case["ratio"].items():
            words = f"{_TITLES[name]}, {short(case['ms'][name]['median'])} ms"
            bars.append(Bar(case["name"], name, relative, words))
    title = "Time over ours; shorter is faster"
    return bars_file(title if record["complete"] else f"{title} (incomplete)", bars)


def _notice(record: Mapping[str, Any]) -> list[str]:
    if record["complete"]:
        return []
    return ["Incomplete: the run did not come to its end; what is missing was not measured.", ""]


def _machine(record: Mapping[str, Any]) -> str:
    environment = record["environment"]
    device = environment["gpu"] or f"CPU, {environment['cpus']} cores"
    splits = record["split_size"]
    mode = "not deterministic" if splits is None else f"split size {splits}"
    return (
        f"{device}, torch {environment['torch']}, flash-attn-deterministic {record['version']}, "
        f"{mode}. Median (10th to 90th percentile) of "
        f"{record['repeats']} calls in turns."
    )
