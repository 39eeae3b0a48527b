"""A document of sections, as one HTML file that needs no other, or as Markdown that links plots."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .judging import NOT_REPRODUCED, NOT_TESTED, QUICK, REPRODUCED, UNDECIDED

_CLAIMS = ("claim", "source", "verdict")
_MANY = 8  # items that are shown without being asked for
_CLASSES = {
    REPRODUCED: "yes",
    NOT_REPRODUCED: "no",
    UNDECIDED: "none",
    NOT_TESTED: "none",
    QUICK: "none",
}
_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff;margin:0 auto;
max-width:60rem;padding:1rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.2}h2{font-size:1.2rem;margin:2.6rem 0 .3rem;line-height:1.3}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .6rem;border-bottom:1px solid #ddd}
.scroll{overflow-x:auto;background-repeat:no-repeat;
background-size:2.5rem 100%,2.5rem 100%,.9rem 100%,.9rem 100%;
background-position:0 0,100% 0,0 0,100% 0;background-attachment:local,local,scroll,scroll;
background-image:linear-gradient(to right,#fff 40%,transparent),
linear-gradient(to left,#fff 40%,transparent),linear-gradient(to right,#bbb,transparent),
linear-gradient(to left,#bbb,transparent)}
.verdict{display:inline-block;padding:.05rem .5rem;border-radius:.3rem;font-size:.85rem;
font-weight:600}
.yes{background:#d8f0e3;color:#0b4f2c}.some{background:#fdeccb;color:#5f3c00}
.no{background:#f9d9d3;color:#6d1606}.none{background:#e7e7e7;color:#333}
figure{margin:1.2rem 0}figure img{max-width:100%;height:auto}
figcaption{color:#555;font-size:.88rem}
details{margin:.6rem 0}li{overflow-wrap:anywhere}
a{color:#00538a}
@media(max-width:40rem){body{font-size:15px;padding:.8rem}th,td{padding:.35rem .3rem}
figure{overflow-x:auto}figure img{min-width:34rem}}
"""


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


def html_page(title: str, intro: str, sections: Sequence[Section]) -> str:
    """Returns a page with its figures inside; claims are listed at the top."""
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(intro)}</p>"]
    claims = [[f"<a href='#{section.key}'>{html.escape(section.title)}</a>",
               html.escape(section.source), _badge(section.verdict)]
              for section in sections if section.verdict]  # fmt: skip
    body += _html_table(_CLAIMS, claims)
    for section in sections:
        key = f" id='{section.key}'" if section.key else ""
        body.append(f"<h2{key}>{html.escape(section.title)}</h2>")
        if section.verdict:
            body.append(_badge(section.verdict))
        if section.text:
            body.append(f"<p>{html.escape(section.text)}</p>")
        if section.items:
            items = "".join(f"<li>{html.escape(item)}</li>" for item in section.items)
            body += _folded(len(section.items), [f"<ul>{items}</ul>"])
        body += [_html_figure(*figure) for figure in section.figures]
        body += _html_table(section.header, [map(html.escape, row) for row in section.rows])
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _badge(verdict: str) -> str:
    return f"<span class='verdict {_CLASSES.get(verdict, 'some')}'>{html.escape(verdict)}</span>"


def _folded(count: int, lines: list[str]) -> list[str]:
    """A list, which a reader has to open where it is long."""
    if count <= _MANY:
        return lines
    return [f"<details><summary>{count} numbers</summary>", "", *lines, "", "</details>"]


def _html_figure(caption: str, path: Path) -> str:
    data, caption = base64.b64encode(path.read_bytes()).decode(), html.escape(caption)
    return (
        f"<figure><img alt='{caption}' src='data:image/svg+xml;base64,{data}'>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _html_table(header: Sequence[str], rows: Sequence[Iterable[str]]) -> list[str]:
    lines = ["".join(f"<th>{cell}</th>" for cell in header)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return [f"<div class='scroll'><table>{table}</table></div>"] if rows else []


def markdown(title: str, intro: str, sections: Sequence[Section], folder: Path) -> str:
    """Returns the same as Markdown of a folder, from which plots are linked."""
    lines = [f"# {title}", "", intro, ""]
    claims = [[section.title, section.source, f"**{section.verdict}**"]
              for section in sections if section.verdict]  # fmt: skip
    lines += _markdown_table(_CLAIMS, claims)
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        if section.verdict:
            lines += [f"**{section.verdict}**", ""]
        if section.text:
            lines += [section.text, ""]
        lines += _folded(len(section.items), [f"- {item}" for item in section.items])
        for caption, path in section.figures:
            lines += ["", f"![{caption}]({Path(os.path.relpath(path, folder)).as_posix()})"]
        lines += _markdown_table(section.header, section.rows)
    return "\n".join(lines) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows] if rows else []
    return ["| " + " | ".join(cells) + " |" for cells in lines]
