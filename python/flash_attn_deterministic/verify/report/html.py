"""A report as one HTML page, style and plots included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .document import Block, blocks
from .style import STYLE
from .tables import MARKS, Table


def html(record: Mapping[str, Any]) -> str:
    """Returns a report as a page."""
    status = record["status"]
    device = record["environment"].get("gpu") or "CPU"
    wheel = record["wheel"]["filename"] or "the installed package, no wheel named"
    body = "\n".join(part for block in blocks(record) for part in _parts(block))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Verification {escape(status)}: flash-attn-deterministic</title>
<style>{STYLE}</style>
</head>
<body>
<header class="{escape(status)}"><h1>{escape(MARKS[status])}</h1>
<p>Verification of <b>{escape(wheel)}</b> on {escape(device)}, {escape(record["started"][:10])}</p>
</header>
<main>
{body}
<footer>Report digest <code>{escape(record.get("digest", ""))}</code>. The numbers are in
verification.json.</footer>
</main>
</body>
</html>
"""


def _parts(block: Block) -> Iterator[str]:
    kind, content = block.kind, block.content
    if kind in ("h2", "h3", "p", "pre"):
        yield f"<{kind}>{escape(content)}</{kind}>"
    elif kind == "ul" and content:
        items = "".join(f"<li>{escape(text)}</li>" for text in content)
        yield f'<ul class="{block.style}">{items}</ul>'
    elif kind == "tiles":
        tiles = (
            f'<div class="tile {escape(state)}"><span>{escape(title)}</span><b>{escape(value)}</b>'
            f"<small>{escape(text)}</small><em>{escape(MARKS[state])}</em></div>"
            for title, value, text, state in content
        )
        yield f'<div class="tiles">{"".join(tiles)}</div>'
    elif kind == "plots":
        yield f'<h2>Cost and accuracy</h2><div class="plots">{"".join(content)}</div>'
    elif kind == "table":
        table = _table(content, block.style)
        summary = f"<details><summary>{escape(block.folded)}</summary>{table}</details>"
        yield summary if block.folded else table


def _table(table: Table, kind: str) -> str:
    head = f"<thead>{_row(table, table.header, 'th')}</thead>" if any(table.header) else ""
    body = "".join(_row(table, row, "td") for row in table.rows)
    return (
        f'<div class="scroll {kind}" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'
    )


def _row(table: Table, cells: Sequence[str], tag: str) -> str:
    parts = []
    for number, cell in enumerate(cells):
        classes = ["n"] if number >= table.numbers else []
        classes += [{"✓": "passed", "✗": "failed"}[cell[0]]] if cell[:1] in ("✓", "✗") else []
        name = tag if number else "th"
        style = f' class="{" ".join(classes)}"' if classes else ""
        parts.append(f"<{name}{style}>{escape(cell)}</{name}>")
    return f"<tr>{''.join(parts)}</tr>"
