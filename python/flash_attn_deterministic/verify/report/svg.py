"""Plots as SVG text: bars and lines, drawn for the width of a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 360  # units; a unit is a pixel on a narrow phone
_ROW = 20
_LETTER = 6.6  # of the text in a file, on average
COLOURS = ("#8a97a8", "#1f6fd0", "#d9822b", "#2b9a66", "#8e4ec6", "#c2410c", "#0e7490", "#b0126f")
CLASSES = "abcdefgh"  # of COLOURS, in the style sheet


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        label: above a group of bars.
        name: of the series.
        value: its length; None draws no bar, only the text.
        text: written at its end.
    """

    label: str
    name: str
    value: float | None
    text: str


def bars(title: str, found: Sequence[Bar], line: float | None = None, line_text: str = "") -> str:
    """Draws horizontal bars, grouped by label, as a figure of the report.

    Args:
        title: for those who can't see the plot.
        found: the bars, those of a group together.
        line: a value to mark.
        line_text: what that is.
    """
    names = list(dict.fromkeys(bar.name for bar in found))
    height, parts = _bars(found, names, line, line_text, _WIDTH - 62.0)
    return _figure(title, height, parts, names if len(names) > 1 else [])


def bars_file(title: str, found: Sequence[Bar]) -> str:
    """Draws the same as the text of an SVG file of its own; each bar's text should name it."""
    names = list(dict.fromkeys(bar.name for bar in found))
    height, parts = _bars(found, names, None, "", 150.0)
    texts = [150 + len(bar.text) * _LETTER for bar in found]
    width = max([len(title) * _LETTER * 1.1, *texts, *(len(bar.label) * _LETTER for bar in found)])
    box = f"-10 -30 {width + 20:.0f} {height + 40:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" '
        f'font-family="sans-serif"><title>{escape(title)}</title><style>{_FILE_STYLE}</style>'
        f'<rect x="-10" y="-30" width="100%" height="100%" fill="#fff"/>'
        f'<text x="0" y="-10" font-weight="bold">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


_FILE_STYLE = "text{font-size:12px;fill:#1c2430}.n{fill:#5b6675}" + "".join(
    f".{name}{{fill:{colour}}}" for name, colour in zip(CLASSES, COLOURS, strict=True)
)


def _bars(
    found: Sequence[Bar],
    names: Sequence[str],
    line: float | None,
    line_text: str,
    most: float,
) -> tuple[float, list[str]]:
    """Returns the height and the parts; the longest bar takes `most` of the width."""
    longest = max([line or 0.0, *(bar.value or 0.0 for bar in found)]) or 1.0
    scale = most / longest
    parts: list[str] = []
    y, label = 0.0, ""
    for bar in found:
        if bar.label != label:
            label = bar.label
            y += 18
            parts.append(f'<text x="0" y="{y - 4:.1f}">{escape(label)}</text>')
        width = 0.0 if bar.value is None else max(1.0, bar.value * scale)
        colour = _colour(names.index(bar.name)) if len(names) > 1 else "b"
        parts.append(
            f'<rect class="{colour}" x="0" y="{y:.1f}" width="{width:.1f}" height="{_ROW - 5}" '
            'rx="2"/>'
        )
        parts.append(
            f'<text x="{width + 4:.1f}" y="{y + 12:.1f}" class="n">{escape(bar.text)}</text>'
        )
        y += _ROW
    if line is not None:
        x = line * scale
        mark = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{y:.1f}" class="limit"/>'
        parts.insert(0, mark)  # under the texts
        anchor = "end" if x > _WIDTH / 2 else "start"
        y += 14
        parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="n">'
            f"{escape(line_text)}</text>"
        )
    return y + 6, parts


def lines(
    title: str, categories: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> str:
    """Draws a line for each series over named categories, on a logarithmic axis; "" without any.

    Args:
        title: for those who can't see the plot.
        categories: names along the bottom.
        series: values by name, one for each category; what has no logarithm is left out.
    """
    values = [value for one in series.values() for value in one if value]
    if not values:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    left, right, top, bottom = 44.0, 24.0, 14.0, 170.0
    step = (_WIDTH - left - right - 24) / max(1, len(categories) - 1)

    def height(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - top)

    parts = []
    for power in range(low, high + 1):
        y = height(10.0**power)
        parts.append(f'<line x1="{left}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        place = f'x="{left - 6}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f'<text {place} class="n">{10.0**power:g}</text>')
    places = [left + 30 + number * step for number in range(len(categories))]
    for number, (x, category) in enumerate(zip(places, categories, strict=True)):
        anchor = "end" if number and number == len(categories) - 1 else "middle"
        at = _WIDTH if anchor == "end" else x
        parts.append(
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{escape(category)}</text>'
        )
    for number, one in enumerate(series.values()):
        colour = _colour(number)
        points = [(x, height(value)) for x, value in zip(places, one, strict=True) if value]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        # The first is the widest, so that it is seen where another one lies on it.
        wide = 2.0 + 2.5 * (len(series) - 1 - number)
        parts.append(f'<polyline class="{colour}" stroke-width="{wide}" points="{path}"/>')
        parts += [
            f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{wide + 1.5}"/>'
            for x, y in points
        ]
    return _figure(title, bottom + 26, parts, list(series))


def _colour(number: int) -> str:
    """Returns the class of a series; each has its own.

    Raises:
        ValueError: there are more series than colours.
    """
    if number >= len(CLASSES):
        raise ValueError(f"a plot has {len(CLASSES)} colours, got series {number + 1}")
    return CLASSES[number]


def _figure(title: str, height: float, parts: Sequence[str], names: Sequence[str]) -> str:
    """Puts a plot and its legend together; the legend is HTML, which wraps."""
    drawing = (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
    keys = "".join(
        f'<span><i class="{_colour(number)}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    legend = f'<p class="legend">{keys}</p>' if keys else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{drawing}</figure>"
