"""The results of bench as a table, Markdown and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verify.report.numbers import milliseconds, ratio, short, size
from ..verify.report.svg import Bar, bars_file
from .peers import PEERS, VARIANTS

_TITLES = {peer.name: peer.title for peer in (*PEERS, *VARIANTS)}


def rows(record: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Returns shape, peer, milliseconds, ratio to ours and memory; a reason where it failed."""
    found = []
    for case in record["cases"]:
        for name, time in case["ms"].items():
            peak = case["peak_bytes"].get(name)
            found.append(
                (
                    case["name"],
                    _TITLES[name],
                    milliseconds(time),
                    ratio(case["ratio"][name]) if name in case["ratio"] else "",
                    "" if peak is None else size(peak),
                )
            )
        for name, reason in case["failed"].items():
            found.append((case["name"], _TITLES[name], f"- {reason}", "", ""))
    return found


HEADER = ("shape", "implementation", "ms", "of ours", "peak memory")


def markdown(record: Mapping[str, Any]) -> str:
    """Returns the results as Markdown."""
    lines = ["# Benchmark", "", *_notice(record), _machine(record), ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|---|---|---:|---:|---:|"]
    lines += ["| " + " | ".join(w.replace("|", "\\|") for w in row) + " |" for row in rows(record)]
    return "\n".join(lines) + "\n"


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
    return (
        f"{device}, torch {environment['torch']}, flash-attn-deterministic {record['version']}, "
        f"split size {record['split_size']}. Median (10th to 90th percentile) of "
        f"{record['repeats']} calls in turns."
    )
