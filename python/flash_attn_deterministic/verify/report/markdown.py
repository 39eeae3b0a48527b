"""A report as Markdown, without plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .document import Block, blocks
from .tables import MARKS, Table


def markdown(record: Mapping[str, Any]) -> str:
    """Returns a report as Markdown."""
    lines = [f"# Verification: {MARKS[record['status']]}", ""]
    for block in blocks(record):
        found = list(_lines(block))
        lines += [*found, ""] if found else []
    return "\n".join(lines[:-1]) + "\n"


def _lines(block: Block) -> Iterator[str]:
    content = block.content
    if block.kind in ("h2", "h3"):
        yield f"{'#' * int(block.kind[1])} {_escaped(content)}"
    elif block.kind == "p":
        yield _escaped(content)
    elif block.kind == "pre":
        yield from (f"    {line}" for line in content.splitlines())
    elif block.kind == "ul":
        yield from (f"- {_escaped(text)}" for text in content)
    elif block.kind == "tiles":
        for title, value, text, status in content:
            yield f"- **{title}: {value}** ({text}) - {MARKS[status]}"
    elif block.kind == "table":
        yield from table_lines(content)


def table_lines(table: Table) -> Iterator[str]:
    """Yields the lines of a table."""
    marks = ["---:" if i >= table.numbers else "---" for i in range(len(table.header))]
    for cells in (table.header, marks, *table.rows):
        yield "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
