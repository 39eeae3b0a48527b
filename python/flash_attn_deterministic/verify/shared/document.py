"""A document of sections, as one HTML file that needs no other, or as Markdown that links plots."""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Section:
    """A part of a document; one with a verdict is on a claim, and listed at the top."""

    title: str
    text: str = ""  # a paragraph
    items: Sequence[str] = ()  # a list, folded where it is long
    figures: Sequence[tuple[str, Path]] = ()  # captions and SVG files
    header: Sequence[str] = ()  # of a table
    rows: Sequence[Sequence[str]] = ()
    key: str = ""  # what the list of claims links to
    source: str = ""  # who makes the claim
    verdict: str = ""  # what the data say of it
    mark: str = "some"  # class of the verdict in the style sheet: yes, no, some or none


@dataclass(frozen=True)
class Document:
    """A title, a paragraph, and sections."""

    title: str
    intro: str
    sections: Sequence[Section]
    # heads of the list of sections with a verdict
    columns: tuple[str, str, str] = ("claim", "source", "verdict")


def html(document: Document) -> str:
    """Returns a page with its figures inside; claims are listed at the top."""
    text: str = _template("page.html.j2").render(document=document, data=_data)
    return text


def markdown(document: Document, folder: Path) -> str:
    """Returns the same as Markdown of a folder, from which plots are linked."""

    def link(path: Path) -> str:
        return Path(os.path.relpath(path, folder)).as_posix()

    text: str = _template("page.md.j2").render(document=document, link=link, table=table)
    return text.rstrip() + "\n"


def _data(path: Path) -> str:
    """Returns a picture as a data URL."""
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join(map(_row, (header, ["---"] * len(header), *rows)))


def _row(cells: Sequence[str]) -> str:
    """Returns a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


@functools.cache
def _template(name: str) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["row"] = _row
    return environment.get_template(name)
