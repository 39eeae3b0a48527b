"""The report as one HTML page that needs nothing else: style and plots are in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from . import tables
from .markdown import measured, notices
from .plots import plots
from .style import STYLE
from .tables import MARKS, Table


def html(record: Mapping[str, Any]) -> str:
    """Returns a report as a page: the verdict and key numbers first, then plots, then tables."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    status = record["status"]
    device = record["environment"].get("gpu") or "CPU"
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Verification {escape(status)}: flash-attn-deterministic</title>"
    yield f"<style>{STYLE}</style>\n</head>\n<body>"
    yield f'<header class="{escape(status)}"><h1>{escape(MARKS[status])}</h1>'
    wheel = record["wheel"]["filename"] or "the installed package, no wheel named"
    yield f"<p>Verification of <b>{escape(wheel)}</b> on {escape(device)}, "
    yield f"{escape(record['started'][:10])}</p></header>\n<main>"
    found = notices(record)
    if found:
        items = "".join(f"<li>{escape(text)}</li>" for text in found)
        yield f'<ul class="notices">{items}</ul>'
    yield '<div class="tiles">'
    for title, value, text, state in tables.headline(record):
        yield (
            f'<div class="tile {escape(state)}"><span>{escape(title)}</span>'
            f"<b>{escape(value)}</b><small>{escape(text)}</small>"
            f"<em>{escape(MARKS[state])}</em></div>"
        )
    yield "</div>"
    yield _table(tables.sections(record))
    why = "".join(f"<li>{escape(text)}</li>" for text in tables.reasons(record))
    if why:
        yield f'<ul class="reasons">{why}</ul>'
    yield "<h2>Contract</h2><p>The bits of a row of the output do not depend on what is named on "
    yield "the left. A cell counts cases of one head dim and dtype.</p>"
    yield _table(tables.contract(record), "matrix")
    yield "<details><summary>What the rows promise</summary>"
    yield _table(tables.promises(record)) + "</details>"
    yield from _counter_examples(record)
    drawn = plots(record)
    if drawn:
        yield f'<h2>Cost and accuracy</h2><div class="plots">{"".join(drawn)}</div>'
    for name, table in measured(record).items():
        yield from _section(tables.section_of(record, name), table)
    yield "<h2>What ran where</h2>"
    yield _table(tables.facts(record), "facts")
    yield _table(tables.architectures(record))
    yield f"<footer>Report digest <code>{escape(record.get('digest', ''))}</code>. The numbers are "
    yield "in verification.json.</footer>\n</main>\n</body>\n</html>"


def _counter_examples(record: Mapping[str, Any]) -> Iterator[str]:
    for check in tables.section_of(record, "contract")["data"].get("checks", []):
        if check["counter_example"] is not None:
            yield f"<h3>First counter-example of {escape(check['id'])}</h3>"
            yield _table(tables.counter_example(check), "facts")
        elif check["status"] == "error":
            yield f"<h3>{escape(check['id'])}: no result</h3><p>{escape(check['reason'] or '')}</p>"
            if check["stderr"]:
                yield f"<pre>{escape(check['stderr'])}</pre>"


def _section(section: Mapping[str, Any], table: Table) -> Iterator[str]:
    yield f"<h2>{escape(section['title'])}</h2>"
    yield f"<p>{escape(MARKS[section['status']])}"
    for text in (section["reason"], section["data"].get("criterion")):
        if text:
            yield f"· {escape(text)}"
    yield "</p>"
    if table.rows:
        closed = len(table.rows) > 12
        yield f"<details{'' if closed else ' open'}><summary>Numbers</summary>"
        yield _table(table) + "</details>"


def _table(table: Table, kind: str = "") -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        parts = []
        for number, cell in enumerate(cells):
            classes = ["n"] if number >= table.numbers else []
            if cell.startswith("✓"):
                classes.append("passed")
            elif cell.startswith("✗"):
                classes.append("failed")
            name = "th" if tag == "th" or number == 0 else "td"
            style = f' class="{" ".join(classes)}"' if classes else ""
            parts.append(f"<{name}{style}>{escape(cell)}</{name}>")
        return f"<tr>{''.join(parts)}</tr>"

    head = f"<thead>{line(table.header, 'th')}</thead>" if any(table.header) else ""
    body = "".join(line(row, "td") for row in table.rows)
    return (
        f'<div class="scroll {kind}" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'
    )
