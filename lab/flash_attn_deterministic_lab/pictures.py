"""Every picture, as an SVG file; matplotlib is imported here and only when plotting."""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .shared.files import write_files

# Okabe and Ito's colours, which most people tell apart, also in grey, and six of Tol's: each series
# has a colour and a marker of its own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31",
           "#882255", "#999933", "#44AA99", "#332288", "#DDAA33", "#BBBBBB")  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d", "8")
_TALLEST = 9.6  # inches: 920 pixels of an SVG file

Values = Sequence[float | None]  # of all draws


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


def draw_all(figures: Mapping[str, Panels], folder: Path) -> list[Path]:
    """Draws figures into a folder, as NAME.svg, and returns the files."""
    pyplot = load_pyplot()
    for name, panels in figures.items():
        write_files(folder, {f"{name}.svg": svg(panels.draw(pyplot))})
    return [folder / f"{name}.svg" for name in figures]


def svg(figure: Any) -> str:
    """Returns a figure as the text of an SVG file, the same for the same figure, and closes it."""
    for axes in figure.axes:
        name_ticks(axes)
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


def name_ticks(axes: Any) -> None:
    """Names the ticks of logarithmic axes that no figure has named itself.

    In plain text: matplotlib writes powers in a font that other machines may not have.
    """
    from matplotlib import ticker

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), ticker.FixedLocator):
            continue
        low, high = axis.get_view_interval()
        digits: tuple[float, ...] = (1,)
        if high < 300 * low:
            digits = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(ticker.LogLocator(subs=digits, numticks=9))
        axis.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick:g}"))
        axes.minorticks_off()


@dataclass(frozen=True)
class Line:
    """Points of a line: x, and values of all draws."""

    label: str
    points: Sequence[tuple[float, Values]]
    colour: int  # a place in COLOURS
    style: str = "-"


@dataclass(frozen=True)
class LinePanels:
    """A figure of medians over draws, with bands from the least to the largest."""

    shown: Mapping[str, Sequence[Line]]  # of each panel, by its title
    labels: tuple[str, str]  # of the x and the y axes, which are logarithmic
    ticks: Mapping[float, str] | Iterable[float] = ()  # of the x axes; none: matplotlib's
    sharey: bool = True  # whether panels have one range of y
    decades: int = 20  # of the y axis, at most

    def draw(self, pyplot: Any) -> Any:
        figure, grid = _grid(pyplot, list(self.shown), 3.4, self.sharey)
        ticks = self.ticks
        named = ticks if isinstance(ticks, Mapping) else {x: f"{x:g}" for x in sorted({*ticks})}
        for axes, lines in zip(grid.flat, self.shown.values(), strict=False):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel(self.labels[0])
            for above, each in zip(range(len(lines) - 1, -1, -1), lines, strict=True):
                if each.points:
                    _line(axes, each, above)
            if named:
                axes.set_xticks(list(named), list(named.values()), fontsize=7.5)
                axes.xaxis.minorticks_off()
        for axes in grid.flat:
            # Rounding far below what is of interest would take most of the axis.
            low, top = axes.get_ylim()
            axes.set_ylim(bottom=max(low, top * 10.0**-self.decades))
        for row in grid:
            row[0].set_ylabel(self.labels[1])
        _legend_below(figure, grid)
        return figure


def _line(axes: Any, line: Line, above: int) -> None:
    """Draws a line, wider the more lines come above it: equal ones all show."""
    # JSON has null where a result was infinite or NaN.
    found = [
        (x, [value for value in values if value is not None])
        for x, values in sorted(line.points, key=lambda point: point[0])
    ]
    # A logarithmic axis has no place for 0: the legend says what it can't show.
    left_out = sum(value <= 0 for _, values in found for value in values)
    total = sum(len(values) for _, values in found)
    label = f"{line.label} ({left_out} of {total} are 0)" if left_out else line.label
    colour, marker = COLOURS[line.colour], MARKERS[line.colour]
    found = [(x, values) for x, values in found if values and statistics.median(values) > 0]
    xs = [x for x, _ in found]
    axes.plot(
        xs, [statistics.median(values) for _, values in found], line.style,
        color=colour, marker=marker, markersize=min(4.5 + 1.5 * above, 9),
        linewidth=min(1.4 + above, 4.4), label=label,
        markerfacecolor=colour if line.style == "-" else "white",
    )  # fmt: skip
    least = [min(value for value in values if value > 0) for _, values in found]
    most = [max(values) for _, values in found]
    axes.fill_between(xs, least, most, color=colour, alpha=0.13, linewidth=0)


def _grid(
    pyplot: Any, titles: Sequence[str], height: float, sharey: bool = True
) -> tuple[Any, Any]:
    """Panels with titles, in rows of two or three."""
    columns = 2 if len(titles) in (2, 4) else min(3, len(titles))
    rows = -(-len(titles) // columns)
    size = (6.4 if columns == 1 else 4.1 * columns, min(rows * height, _TALLEST))
    figure, grid = pyplot.subplots(
        rows, columns, figsize=size, sharex=True, sharey=sharey, squeeze=False
    )
    for axes, title in itertools.zip_longest(grid.flat, titles):
        axes.set_visible(title is not None)
        axes.set_title(title or "")
        axes.tick_params(labelbottom=True)
    return figure, grid


def _legend_below(figure: Any, grid: Any) -> None:
    """One legend for all panels, under them."""
    found = {label: handle for axes in grid.flat
             for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
    labels, handles = list(found), list(found.values())
    columns = 3 if len(grid[0]) < 3 else 5
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


# Name, interval (low, middle, high), wanted range, and whether the interval lies in it.
Held = tuple[str, tuple[float, float, float], tuple[float, float], bool | None]
_VERDICTS = {True: ("inside", 0, "o"), False: ("outside", 1, "X"), None: ("not decided", 6, "D")}


@dataclass(frozen=True)
class HeldPanels:
    """A figure of numbers with their intervals, beside the ranges that they are held against."""

    shown: Mapping[
        str, Sequence[Held]
    ]  # rows of each panel, from above, by the label of its x axis

    def draw(self, pyplot: Any) -> Any:
        counts = [len(rows) for rows in self.shown.values()]
        height = min(0.24 * sum(counts) + 0.9 * len(counts), _TALLEST)
        figure, grid = pyplot.subplots(
            len(counts),
            1,
            figsize=(8, height),
            squeeze=False,
            height_ratios=[n + 2 for n in counts],
        )
        for axes, (label, rows) in zip(grid.flat, self.shown.items(), strict=True):
            numbers = [n for _, interval, _, _ in rows for n in interval if math.isfinite(n)]
            if numbers and 0 < 10 * min(numbers) < max(numbers):
                axes.set_xscale("log")
            _held(axes, rows)
            axes.set_xlabel(label)
            axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
            axes.tick_params(axis="y", labelsize=8 if sum(counts) < 30 else 6)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
        _legend_below(figure, grid)
        return figure


def _held(axes: Any, rows: Sequence[Held]) -> None:
    for holds, (word, colour, marker) in _VERDICTS.items():
        found = [(place, row[1]) for place, row in enumerate(rows) if row[3] is holds]
        for place, (low, _, high) in found:
            axes.plot([low, high], [place, place], color=COLOURS[colour], linewidth=1.4)
        middles = [middle for _, (_, middle, _) in found]
        axes.plot(middles, [place for place, _ in found], marker, color=COLOURS[colour],
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


Panels = LinePanels | HeldPanels


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
