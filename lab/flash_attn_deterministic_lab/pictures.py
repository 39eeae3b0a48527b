"""Every picture, as an SVG file; matplotlib is imported here and only when plotting."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TALLEST = 9.6  # inches: 920 pixels of an SVG file


@functools.cache
def load_pyplot() -> Any:
    """Imports matplotlib.pyplot, without a display."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as pyplot

    pyplot.rcParams.update(
        {
            # Text stays text, and the same study gives the same bytes.
            "svg.fonttype": "none",
            "svg.hashsalt": "flash-attn-deterministic",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.grid": True,
            "grid.color": "#e4e4e4",
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "figure.constrained_layout.use": True,
        }
    )
    return pyplot


def svg(figure: Any) -> str:
    """Returns a figure as the text of an SVG file, the same for the same figure, and closes it."""
    image = io.StringIO()
    figure.savefig(image, format="svg", metadata={"Date": None}, bbox_inches="tight")
    load_pyplot().close(figure)
    return _shortened(image.getvalue())


def _shortened(svg: str) -> str:
    """Leaves out of an SVG what no reader sees: a third of its bytes."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg)
    # A hundredth of a point is enough for coordinates.
    number = re.compile(r"-?\d+\.\d{3,}")
    return re.sub(
        r' (?:d|x|y)="[^"]*"',
        lambda path: number.sub(lambda digits: f"{float(digits[0]):.2f}", path[0]),
        svg,
    )


# Name, interval (low, middle, high), wanted range, and whether the interval lies in it.
Held = tuple[str, tuple[float, float, float], tuple[float, float], bool | None]
# Okabe and Ito's colours, which most people tell apart, also in grey.
_VERDICTS = {True: ("inside", "#0072B2", "o"), False: ("outside", "#D55E00", "X"),
             None: ("not decided", "#000000", "D")}  # fmt: skip


def held(shown: Mapping[str, Sequence[Held]]) -> str:
    """Draws numbers with their intervals beside the ranges that they are held against, as SVG.

    Args:
        shown: the rows of each panel, from above, by the label of its x axis.
    """
    pyplot = load_pyplot()
    counts = [len(rows) for rows in shown.values()]
    height = min(0.24 * sum(counts) + 0.9 * len(counts), _TALLEST)
    ratios = [count + 2 for count in counts]
    figure, grid = pyplot.subplots(
        len(counts), 1, figsize=(8, height), squeeze=False, height_ratios=ratios
    )
    for axes, (label, rows) in zip(grid.flat, shown.items(), strict=True):
        numbers = [n for _, interval, _, _ in rows for n in interval if math.isfinite(n)]
        logarithmic = bool(numbers) and 0 < 10 * min(numbers) < max(numbers)
        if logarithmic:
            axes.set_xscale("log")
        _draw_rows(axes, rows)
        if logarithmic:
            _name_ticks(axes)
        axes.set_xlabel(label)
        axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
        axes.tick_params(axis="y", labelsize=8 if sum(counts) < 30 else 6)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return svg(figure)


def _draw_rows(axes: Any, rows: Sequence[Held]) -> None:
    for holds, (word, colour, marker) in _VERDICTS.items():
        found = [(place, row[1]) for place, row in enumerate(rows) if row[3] is holds]
        for place, (low, _, high) in found:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.4)
        middles = [middle for _, (_, middle, _) in found]
        axes.plot(middles, [place for place, _ in found], marker, color=colour,
                  markersize=4.5, label=word)  # fmt: skip
    # Ends of the ranges belong into the picture, too, where the axis has a place for them.
    ends = {end for *_, wanted, _ in rows for end in wanted if math.isfinite(end)}
    for end in ends - ({0} if axes.get_xscale() == "log" else set()):
        axes.plot([end], [0], alpha=0)
    left, right = axes.get_xlim()
    for place, (*_, (low, high), _) in enumerate(rows):
        begin, end = max(low, left), min(high, right)
        axes.broken_barh(
            [(begin, end - begin)], (place - 0.5, 1), color="#009E73", alpha=0.13, linewidth=0
        )
    axes.set_xlim(left, right)


def _name_ticks(axes: Any) -> None:
    """Names the ticks of a logarithmic x axis in plain text.

    matplotlib writes powers in a font that other machines may not have.
    """
    from matplotlib import ticker

    low, high = axes.get_xlim()
    digits: tuple[float, ...] = (1,)
    if high < 300 * low:
        digits = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 5, 7)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=digits, numticks=9))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.minorticks_off()


def fields(
    columns: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], note: str
) -> str:
    """Draws a table of coloured fields as an SVG file.

    Args:
        columns: their titles.
        rows: a title and, for each column, the text and the colour of its field.
        note: below the table.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(4.4 + 1.05 * len(columns), 1.1 + 0.27 * len(rows)))
    for row, (_, cells) in enumerate(rows):
        for column, (text, colour) in enumerate(cells):
            axes.add_patch(
                pyplot.Rectangle(
                    (column - 0.48, row - 0.44), 0.96, 0.88, color=colour or "#ffffff", linewidth=0
                )
            )
            ink = "#ffffff" if colour else "#222222"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns, fontsize=7.5)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows])
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(note, loc="left", fontsize=7.5)
    return svg(figure)
