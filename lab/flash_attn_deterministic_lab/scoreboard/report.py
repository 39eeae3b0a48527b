"""The scoreboard as a document, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from ..pictures import fields
from ..shared.document import Document, Section
from .trial import BROKEN, KEPT, NOT_APPLICABLE, NOT_RUN, RAISED

_COLOURS = {KEPT: "#1a7f4b", BROKEN: "#c0392b", RAISED: "#8a6d1a"}
_GREY = "#7b8794"
_LEGEND = (
    "Equal bits in so many of the cases tried. n/a: the calls have no way to ask. raises: the call "
    "raised an error. A star: time was over before all cases had run. Times are medians over those "
    "of the first, in one process."
)


def cell(result: Mapping[str, Any]) -> str:
    """Returns one result in a word: "12/12", "n/a" and so on."""
    words = {NOT_APPLICABLE: "n/a", RAISED: "raises"}
    status = result["status"]
    if status == NOT_RUN and not result["cases"]:
        return "not run"
    star = "*" if status == NOT_RUN else ""
    return words.get(status, f"{result['equal']}/{result['cases']}{star}")


def document(record: Mapping[str, Any]) -> Document:
    """Returns the table, and the first counter-example of each row broken."""
    attentions = record["attentions"]
    rows = [
        [f"{row['id']}: {_promise(row)}", *(cell(one["rows"][row["id"]]) for one in attentions)]
        for row in record["rows"]
    ]
    rows += [[f"time, {name}", *cells] for name, cells in _times(record)]
    reasons = []
    for one in attentions:
        whys: dict[str, list[str]] = {}
        for row in record["rows"]:
            result = one["rows"][row["id"]]
            why = result["counter_example"] or result["reason"]
            if why:
                whys.setdefault(why, []).append(row["id"])
        reasons += [f"{one['title']}, {', '.join(ids)}: {why}" for why, ids in whys.items()]
    reasons += [f"{name}: {reason}" for name, reason in record["unavailable"].items()]
    header = ["the same bits whatever", *(one["title"] for one in attentions)]
    versions = "; ".join(f"{one['title']}: {one['version']}" for one in attentions)
    sections = (
        Section("Rows", _LEGEND, header=header, rows=rows),
        Section("Versions", versions),
        Section("First counter-examples, and reasons", items=reasons),
    )
    return Document("Who keeps which promise of equal bits", _where(record), sections)


def picture(record: Mapping[str, Any]) -> str:
    """Returns the same as an SVG file: a coloured field for each result."""
    attentions = record["attentions"]
    rows = []
    for row in record["rows"]:
        results = [one["rows"][row["id"]] for one in attentions]
        cells = [(cell(one), _COLOURS.get(one["status"], _GREY)) for one in results]
        rows.append((_promise(row), cells))
    rows += [(f"time: {name}", [(text, "") for text in texts]) for name, texts in _times(record)]
    columns = [
        textwrap.fill(one["title"], 15, break_long_words=False, break_on_hyphens=False)
        for one in attentions
    ]
    note = "Equal bits in so many of the cases tried; a star: not all were, for want of time. "
    note += "Times: medians over those of the first column."
    width = 30 + 18 * len(columns)
    return fields(columns, rows, textwrap.fill(f"{note} {_where(record)}", width))


def _times(record: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    names = [one["name"] for one in record["attentions"]]
    return [
        (case["name"], [f"{case['ratio'][n]:.2f}" if n in case["ratio"] else "-" for n in names])
        for case in record["times"]
    ]


def _where(record: Mapping[str, Any]) -> str:
    notes = "Quick run, fewer shapes. " if record["quick"] else ""
    notes += "" if record["complete"] else "Incomplete: the run was interrupted. "
    device = record["hardware"]["gpu"] or "CPU"
    return f"{notes}{device}, torch {record['versions']['torch']}, {record['date']}"


def _promise(row: Mapping[str, Any]) -> str:
    return f"{row['promise']} ({row['source']})" if row["source"] else str(row["promise"])
