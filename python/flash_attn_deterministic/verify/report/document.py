"""A report as a sequence of blocks, which Markdown and HTML render."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import limits
from . import numbers, svg, tables
from .svg import Bar
from .tables import MARKS, section_of

_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True)
class Block:
    """A piece of a report; the content of a kind is what its renderers take."""

    kind: str  # "h2", "h3", "p", "pre", "ul", "tiles", "table" or "plots"
    content: Any
    style: str = ""  # class in HTML
    folded: str = ""  # in HTML the summary under which a table is folded


def blocks(record: Mapping[str, Any]) -> Iterator[Block]:
    """Yields a report: the verdict and key numbers first, then plots, then tables."""
    yield Block("ul", notices(record), "notices")
    yield Block("tiles", tables.headline(record))
    yield Block("table", tables.sections(record))
    yield Block("ul", tables.reasons(record), "reasons")
    yield Block("h2", "Contract")
    yield Block("p", "The bits of a row of the output do not depend on what is named on the left. "
                     "A cell counts cases of one head dim and dtype.")  # fmt: skip
    yield Block("table", tables.contract(record), "matrix")
    yield Block("table", tables.promises(record), folded="What the rows promise")
    for check in _checks(record):
        if check["counter_example"] is not None:
            yield Block("h3", f"First counter-example of {check['id']}")
            yield Block("table", tables.counter_example(check), "facts")
        elif check["status"] == "error":
            yield Block("h3", f"{check['id']}: no result")
            yield Block("p", check["reason"] or "")
            if check["stderr"]:
                yield Block("pre", check["stderr"])
    drawn = plots(record)
    if drawn:
        yield Block("plots", drawn)
    for name, table in tables.measured(record).items():
        section = section_of(record, name)
        yield Block("h2", section["title"])
        words = (MARKS[section["status"]], section["reason"], section["data"].get("criterion"))
        yield Block("p", " · ".join(filter(None, words)))
        if table.rows:
            yield Block("table", table, folded="Numbers" if len(table.rows) > 12 else "")
    yield Block("h2", "What ran where")
    yield Block("table", tables.facts(record), "facts")
    yield Block("table", tables.architectures(record))


def _checks(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    checks: Sequence[Mapping[str, Any]] = section_of(record, "contract")["data"].get("checks", [])
    return checks


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
        return [*found, "Ran on the CPU: none of the wheel's GPU code was verified."]
    if record["architectures"]["unverified"]:
        names = ", ".join(record["architectures"]["unverified"])
        found.append(f"Not verified, because it does not run on this GPU: {names}.")
    # Reports of earlier versions do not have them.
    head_dims: dict[str, list[str]] = {}
    for one in record["build"].get("missing_kernels", []):
        kind = f"{_DIRECTIONS[one['direction']]} {one['dtype']}"
        head_dims.setdefault(kind, []).append(str(one["head_dim"]))
    if head_dims:
        kinds = (f"{kind}, head_dim up to: {', '.join(n)}" for kind, n in head_dims.items())
        found.append(f"Not in the wheel, and so not tested: {'; '.join(kinds)}.")
    for check in _checks(record):
        if (check["id"], check["status"]) == ("golden", "not-applicable"):
            found.append(f"Not compared with earlier wheels: {check['reason']}.")
    return found


def plots(record: Mapping[str, Any]) -> list[str]:
    """Returns a plot of each thing that was measured."""
    found = [
        _seed(record, "performance", "time_ratio", "Time over torch's"),
        _seed(record, "memory", "memory_ratio", "Peak memory over torch's"),
        _seed(record, "scaling", "time_ratio", "Scaling: time over torch's"),
        _accuracy(record),
        _timed(record, "decode", limits.DECODE_TIME_RATIO, " on the geometric mean"),
        _timed(record, "backward", limits.BACKWARD_TIME_RATIO),
    ]
    return [plot for plot in found if plot]


def _seed(record: Mapping[str, Any], name: str, key: str, title: str) -> str:
    data = section_of(record, name)["data"]
    found = []
    for row in data.get("rows", []):
        for side, value in {"standard": 1.0, **row[key]}.items():
            shape = f"{row['shape']} {row['dtype']}"
            found.append(Bar(shape, tables.SIDES.get(side, side), value, numbers.ratio(value)))
    if found and name != "scaling":
        seed = data["seed"]
        label = f"on an {seed['gpu']}, splits of {seed['split_size']}"
        found.append(Bar(label, tables.PROTOTYPE, seed[key], numbers.ratio(seed[key])))
    return svg.bars(title, found)


def _accuracy(record: Mapping[str, Any]) -> str:
    rows = section_of(record, "accuracy")["data"].get("rows", [])
    worst: dict[tuple[int, str, str], float | None] = {}
    for row in rows:
        key = (row["head_dim"], row["dtype"], row["direction"])
        worst[key] = numbers.worst((worst.get(key, 0.0), row["ratio"]))
    found = [
        Bar(f"head dim {head_dim} {dtype}", direction, value, numbers.ratio(value))
        for (head_dim, dtype, direction), value in sorted(worst.items(), key=lambda one: one[0][:2])
    ]
    title = "Largest error over what passes, the worst of each"
    return svg.bars(title, found, 1.0, f"limit {numbers.ratio(1.0)}")


def _timed(record: Mapping[str, Any], name: str, limit: float, words: str = "") -> str:
    section = section_of(record, name)
    found = [
        Bar(f"{row['shape']} {row['dtype']}", "ours", row["time_ratio"],
            numbers.ratio(row["time_ratio"]))
        for row in section["data"].get("rows", [])
    ]  # fmt: skip
    title = f"{section['title']}: time over torch's"
    return svg.bars(title, found, limit, f"limit {numbers.ratio(limit)}{words}")
