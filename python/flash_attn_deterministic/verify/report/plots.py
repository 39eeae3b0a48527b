"""The plots of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import limits
from . import numbers, svg, tables
from .svg import Bar


def plots(record: Mapping[str, Any]) -> list[str]:
    """Returns a plot for each thing that was measured: overhead, memory, scaling and more."""
    found = [
        _seed(record, "performance", "time_ratio", "Time over torch's"),
        _seed(record, "memory", "memory_ratio", "Peak memory over torch's"),
        _scaling(record),
        _accuracy(record),
        _timed(record, "decode", "Decode: time over torch's", limits.DECODE_TIME_RATIO),
        _timed(record, "backward", "Backward: time over torch's", limits.BACKWARD_TIME_RATIO),
    ]
    return [plot for plot in found if plot]


def _seed(record: Mapping[str, Any], name: str, key: str, title: str) -> str:
    bars = []
    data = tables.section_of(record, name)["data"]
    for row in data.get("rows", []):
        bars.append(Bar(f"{row['shape']} {row['dtype']}: torch", "torch", 1.0, "1x"))
        for side, value in row[key].items():
            split = "splits of 512" if side.endswith("_512") else "default split size"
            label, whose = (
                ("upstream's own kernels", "upstream")
                if side == "upstream"
                else (f"ours, {split}", "ours")
            )
            bars.append(Bar(label, whose, value, numbers.ratio(value)))
    if not bars:
        return ""
    seed = data["seed"]
    label = f"{tables.PROTOTYPE} on an {seed['gpu']}, splits of {seed['split_size']}"
    bars.append(Bar(label, tables.PROTOTYPE, seed[key], numbers.ratio(seed[key])))
    return svg.bars(title, bars)


def _scaling(record: Mapping[str, Any]) -> str:
    rows = tables.section_of(record, "scaling")["data"].get("rows", [])
    if not rows:
        return ""
    series = {
        tables.SIDES.get(side, side): [row["ms"][side]["median"] for row in rows]
        for side in rows[0]["ms"]
    }
    names = [" ".join(row["shape"].split()[:2]) for row in rows]
    return svg.lines("Scaling: milliseconds of a forward, H32 D64 fp16", names, series)


def _accuracy(record: Mapping[str, Any]) -> str:
    worst: dict[tuple[str, str], float | None] = {}
    for row in tables.section_of(record, "accuracy")["data"].get("rows", []):
        key = (f"{row['head_dim']} {row['dtype']}", row["direction"])
        worst[key] = numbers.worst((worst.get(key, 0.0), row["ratio"]))
    if not worst:
        return ""
    bars = [
        Bar(f"head dim {config}", direction, value, numbers.ratio(value))
        for (config, direction), value in sorted(
            worst.items(), key=lambda item: (int(item[0][0].split()[0]), item[0][0])
        )
    ]
    limit = limits.ACCURACY_RATIO
    whose = "torch's" if record["device"] == "cuda" else "that of 16-bit rounding"
    title = f"Largest error over {whose}, the worst of each"
    return svg.bars(title, bars, limit, f"limit {numbers.ratio(limit)}")


def _timed(record: Mapping[str, Any], name: str, title: str, limit: float) -> str:
    rows = tables.section_of(record, name)["data"].get("rows", [])
    bars = [
        Bar(
            f"{row['shape']} {row['dtype']}",
            "ours",
            row["time_ratio"],
            numbers.ratio(row["time_ratio"]),
        )
        for row in rows
    ]
    if not bars:
        return ""
    text = f"limit {numbers.ratio(limit)}" + (" on the geometric mean" if name == "decode" else "")
    return svg.bars(title, bars, limit, text)
