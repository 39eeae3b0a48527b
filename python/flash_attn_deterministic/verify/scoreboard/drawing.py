"""The scoreboard as a table in Markdown, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from html import escape
from typing import Any

from .trial import BROKEN, KEPT, NOT_APPLICABLE, NOT_RUN, RAISED

_COLOURS = {KEPT: "#1a7f4b", BROKEN: "#c0392b", RAISED: "#8a6d1a"}
_GREY = "#9aa5b1"
_LEGEND = (
    "Equal bits in so many of the cases tried. n/a: the calls have no way to ask. raises: the call "
    "raised an error. not run: time was over, or the run was interrupted. Times are medians over "
    "those of ours, in one process."
)


def cell(result: Mapping[str, Any]) -> str:
    """Returns one result in a word: "12/12", "n/a" and so on."""
    words = {NOT_APPLICABLE: "n/a", RAISED: "raises", NOT_RUN: "not run"}
    status = result["status"]
    return words.get(status, f"{result['equal']}/{result['cases']}")


def title(attention: Mapping[str, Any]) -> str:
    """Returns name and setting of an attention."""
    setting = attention["setting"]
    return str(attention["name"]) + ("" if setting == "default" else f" ({setting})")


def markdown(record: Mapping[str, Any]) -> str:
    """Returns the scoreboard as a table, with the first counter-example of each row broken."""
    attentions = record["attentions"]
    lines = [
        "# Who keeps which row",
        "",
        f"{_where(record)}. {_LEGEND}",
        "",
        "| the same bits whatever | " + " | ".join(title(one) for one in attentions) + " |",
        "| --- |" + " ---: |" * len(attentions),
    ]
    for row in record["rows"]:
        cells = [cell(one["rows"][row["id"]]) for one in attentions]
        lines.append(f"| {row['id']}: {_promise(row)} | " + " | ".join(cells) + " |")
    for name, times in record["times"].items():
        cells = ["-" if ratio is None else f"{ratio:.2f}" for ratio in times["ratio"]]
        lines.append(f"| time, {name} | " + " | ".join(cells) + " |")
    lines += ["", "Versions: " + "; ".join(f"{title(a)}: {a['version']}" for a in attentions) + "."]
    lines += ["", "## First counter-examples, and reasons", ""]
    for one in attentions:
        whys: dict[str, list[str]] = {}
        for row in record["rows"]:
            result = one["rows"][row["id"]]
            why = result["counter_example"] or result["reason"]
            if why:
                whys.setdefault(why, []).append(row["id"])
        lines += [f"- {title(one)}, {', '.join(ids)}: {why}" for why, ids in whys.items()]
    lines += [f"- {name}: {reason}" for name, reason in record["unavailable"].items()]
    return "\n".join(lines).rstrip() + "\n"


_ROW, _COLUMN, _LEFT, _TOP = 24, 92, 430, 76


def svg(record: Mapping[str, Any]) -> str:
    """Returns the scoreboard as the text of an SVG file: a coloured field for each result."""
    attentions, rows = record["attentions"], record["rows"]
    width = _LEFT + _COLUMN * len(attentions) + 10
    height = _TOP + _ROW * (len(rows) + len(record["times"])) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Which attention keeps its bits</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for column, one in enumerate(attentions):
        middle = _LEFT + _COLUMN * (column + 0.5)
        parts.append(_text(middle, _TOP - 46, one["name"], "middle", bold=True))
        # Also between the words of an option such as use_deterministic_algorithms.
        words = one["setting"].replace("_", "_ ")
        for line, text in enumerate(textwrap.wrap(words, 15)[:3]):
            y = _TOP - 32 + 12 * line
            parts.append(_text(middle, y, text.replace("_ ", "_"), "middle", size=9))
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        parts.append(_text(_LEFT - 8, y + 16, _promise(row), "end", size=11))
        for column, one in enumerate(attentions):
            result = one["rows"][row["id"]]
            x = _LEFT + _COLUMN * column
            colour = _COLOURS.get(result["status"], _GREY)
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{_COLUMN - 2}" height="{_ROW - 2}" rx="3" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(x + _COLUMN / 2, y + 16, cell(result), "middle", colour="#fff"))
    for number, (name, times) in enumerate(record["times"].items()):
        y = _TOP + _ROW * (len(rows) + number)
        parts.append(_text(_LEFT - 8, y + 16, f"time over ours: {name}", "end", size=11))
        for column, ratio in enumerate(times["ratio"]):
            text = "-" if ratio is None else f"{ratio:.2f}"
            parts.append(_text(_LEFT + _COLUMN * (column + 0.5), y + 16, text, "middle"))
    words = f"Equal bits in so many of the cases tried. {_where(record)}"
    parts.append(_text(10, height - 14, words, size=10))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _where(record: Mapping[str, Any]) -> str:
    notes = "Quick run, fewer shapes. " if record["quick"] else ""
    notes += "" if record["complete"] else "Incomplete: the run was interrupted. "
    return f"{notes}{record['device_name']}, torch {record['torch']}, {record['date']}"


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    *,
    size: int = 12,
    bold: bool = False,
    colour: str = "#1c2430",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        f"{weight}>{escape(text)}</text>"
    )


def _promise(row: Mapping[str, Any]) -> str:
    return f"{row['promise']} ({row['source']})" if row["source"] else str(row["promise"])
