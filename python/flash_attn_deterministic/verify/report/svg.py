"""Horizontal bars as SVG, drawn for the width of a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 360  # units; a unit is a pixel on a narrow phone
_ROW = 20
_LETTER = 6.6  # of the text in a file, on average
COLOURS = ("#8a97a8", "#1f6fd0", "#d9822b", "#2b9a66", "#8e4ec6", "#c2410c", "#0e7490", "#b0126f")
CLASSES = "abcdefgh"  # of COLOURS, in the style sheet


@dataclass(frozen=True)
class Bar:
    """One bar."""

    label: str  # above a group of bars
    name: str  # of the series, which has one colour
    value: float | None  # its length; None draws no bar, only the text
    text: str  # written at its end


def bars(title: str, found: Sequence[Bar], line: float | None = None, line_text: str = "") -> str:
    """Draws bars, grouped by label, as a figure of the report; "" without any.

    Args:
        title: also for those who can't see the plot.
        found: the bars, those of a group together.
        line: a value to mark.
        line_text: what that is.

    Raises:
        ValueError: there are more series than colours.
    """
    if not found:
        return ""
    classes = _classes(found)
    height, parts = _bars(found, classes, line, line_text, _WIDTH - 62.0)
    keys = "".join(
        f'<span><i class="{one}"></i>{escape(name)}</span>' for name, one in classes.items()
    )
    # The legend is HTML, which wraps.
    legend = f'<p class="legend">{keys}</p>' if len(classes) > 1 else ""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def bars_file(title: str, found: Sequence[Bar]) -> str:
    """Draws bars as the text of an SVG file; each bar's text should name it."""
    height, parts = _bars(found, _classes(found), None, "", 150.0)
    texts = [150 + len(bar.text) * _LETTER for bar in found]
    width = max([len(title) * _LETTER * 1.1, *texts, *(len(bar.label) * _LETTER for bar in found)])
    box = f"-10 -30 {width + 20:.0f} {height + 40:.0f}"
    style = "text{font-size:12px;fill:#1c2430}.n{fill:#5b6675}" + "".join(
        f".{name}{{fill:{colour}}}" for name, colour in zip(CLASSES, COLOURS, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" '
        f'font-family="sans-serif"><title>{escape(title)}</title><style>{style}</style>'
        f'<rect x="-10" y="-30" width="100%" height="100%" fill="#fff"/>'
        f'<text x="0" y="-10" font-weight="bold">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def _classes(found: Sequence[Bar]) -> dict[str, str]:
    names = list(dict.fromkeys(bar.name for bar in found))
    if len(names) > len(CLASSES):
        raise ValueError(f"a plot has {len(CLASSES)} colours, got {len(names)} series")
    return dict(zip(names, CLASSES if len(names) > 1 else "b", strict=False))


def _bars(
    found: Sequence[Bar], classes: dict[str, str], line: float | None, line_text: str, most: float
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
        parts.append(
            f'<rect class="{classes[bar.name]}" x="0" y="{y:.1f}" width="{width:.1f}" '
            f'height="{_ROW - 5}" rx="2"/><text x="{width + 4:.1f}" y="{y + 12:.1f}" class="n">'
            f"{escape(bar.text)}</text>"
        )
        y += _ROW
    if line is not None:
        x = line * scale
        mark = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{y:.1f}" class="limit"/>'
        parts.insert(0, mark)  # under the texts
        anchor = "end" if x > _WIDTH / 2 else "start"
        y += 14
        text = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="n">'
        parts.append(f"{text}{escape(line_text)}</text>")
    return y + 6, parts
