"""Figures of a study, as SVG files; matplotlib is imported here and only when plotting."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import FlashAttnError
from ..numbers.intervals import finite
from ..study.files import write_text

# Okabe and Ito's colours: told apart by most people, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Values = Sequence[float | None]  # of all draws


class MissingExtraError(FlashAttnError, ImportError):
    """A package that an extra of this one brings is not installed."""


def load_pyplot() -> Any:
    """Imports matplotlib.pyplot, without a display.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(
            "matplotlib is needed for plots and is not installed; run `python -m pip install "
            "matplotlib`, or give --no-plots where the command has it"
        ) from error
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
    written = []
    for name, panels in figures.items():
        path = folder / f"{name}.svg"
        figure = panels.draw(pyplot)
        for axes in figure.axes:
            name_ticks(axes)
        image = io.StringIO()
        figure.savefig(image, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
        write_text(path, _shortened(image.getvalue()))
        written.append(path)
    return written


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
        digits = (1, 2, 5) if high < 300 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=digits, numticks=9))
        axis.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick:g}"))
        axes.minorticks_off()


@dataclass(frozen=True)
class Line:
    """Points of a line: x, and values of all draws."""

    label: str
    points: Sequence[tuple[float, Values]]
    colour: int  # from 8 on lines are dashed and markers hollow
    style: str = ""  # "": by the colour


@dataclass(frozen=True)
class LinePanels:
    """A figure of medians over draws, with bands from the least to the largest."""

    shown: Mapping[str, Sequence[Line]]  # of each panel, by its title
    labels: tuple[str, str]  # of the x and the y axes, which are logarithmic
    ticks: Mapping[float, str] | Iterable[float] = ()  # of the x axes; none: matplotlib's
    levels: Iterable[float] = ()  # at which horizontal lines are drawn
    sharey: bool = True  # whether panels have one range of y

    def draw(self, pyplot: Any) -> Any:
        figure, grid = _grid(pyplot, list(self.shown), 3.4, self.sharey)
        ticks = self.ticks
        named = ticks if isinstance(ticks, Mapping) else {x: f"{x:g}" for x in sorted({*ticks})}
        for axes, lines in zip(grid.flat, self.shown.values(), strict=False):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel(self.labels[0])
            for each in lines:
                _line(axes, each)
            for level in self.levels:
                axes.axhline(level, color="#666666", linewidth=0.8, linestyle=":")
            if named:
                axes.set_xticks(list(named), list(named.values()), fontsize=7.5)
                axes.xaxis.minorticks_off()
        for row in grid:
            row[0].set_ylabel(self.labels[1])
        _legend_below(figure, grid)
        return figure


def _line(axes: Any, line: Line) -> None:
    found = [(x, finite(values)) for x, values in sorted(line.points, key=lambda point: point[0])]
    # A logarithmic axis has no place for 0: the panel says what it can't show.
    left_out = sum(value <= 0 for _, values in found for value in values)
    colour, marker = COLOURS[line.colour % 8], MARKERS[line.colour % 8]
    if left_out:
        total = sum(len(values) for _, values in found)
        text = f"{line.label}: {left_out} of {total} are 0 or less"
        axes.text(0.01, 0.01 + 0.05 * len(axes.texts), text, color=colour, fontsize=6,
                  transform=axes.transAxes)  # fmt: skip
    found = [(x, values) for x, values in found if values and statistics.median(values) > 0]
    xs = [x for x, _ in found]
    style = line.style or ("-" if line.colour < 8 else "--")
    axes.plot(
        xs, [statistics.median(values) for _, values in found], style,
        color=colour, marker=marker, markersize=4.5, linewidth=1.4, label=line.label,
        markerfacecolor=colour if style == "-" else "white",
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
    width = 6.4 if columns == 1 else 4.1 * columns
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(width, rows * height), sharex=True, sharey=sharey, squeeze=False
    )
    for axes, title in zip(grid.flat, titles, strict=False):
        axes.set_title(title)
    return figure, grid


def _legend_below(figure: Any, grid: Any) -> None:
    """One legend for all panels, under them."""
    handles, labels = grid[0][0].get_legend_handles_labels()
    columns = 3 if len(grid[0]) < 3 else 5
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


@dataclass(frozen=True)
class DotPanels:
    """A figure of medians as points on named rows, with bars from the least to the largest."""

    # Of each panel, by its title: labels, and values of each row.
    shown: Mapping[str, Sequence[tuple[str, Mapping[str, Values]]]]
    rows: Sequence[str]  # their names, from above
    label: str  # of the x axes
    scale: str = "log"  # of the x axes, or "linear"

    def draw(self, pyplot: Any) -> Any:
        most = max(len(series) for series in self.shown.values())
        count = len(self.rows)
        each = 0.26 if count > 20 else max(0.26, 0.07 * most)
        figure, grid = _grid(pyplot, list(self.shown), 1.2 + each * count)
        for axes, series in zip(grid.flat, self.shown.values(), strict=False):
            axes.set_xscale(self.scale)
            axes.set_xlabel(self.label)
            for number, (name, values) in enumerate(series):
                offset = 0.8 * ((number + 0.5) / len(series) - 0.5)
                _dots(axes, self.rows, values, number, name, offset)
            axes.set_yticks(range(count), self.rows)
            axes.set_ylim(count - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", labelsize=8 if count < 20 else 7)
            if self.scale != "log":
                axes.axvline(0, color="#333333", linewidth=0.8)
        _legend_below(figure, grid)
        return figure


def _dots(
    axes: Any, rows: Sequence[str], values: Mapping[str, Values], number: int, label: str,
    offset: float,
) -> None:  # fmt: skip
    colour, marker = COLOURS[number % 8], MARKERS[number % 8]
    face = colour if number < 8 else "white"
    for place, row in enumerate(rows):
        found = finite(values.get(row, ()))
        if not found or (axes.get_xscale() == "log" and min(found) <= 0):
            text = "0" if found else "overflow" if row in values else ""
            axes.text(0.01, place + offset, text, color=colour, fontsize=7, va="center",
                      transform=axes.get_yaxis_transform())  # fmt: skip
            continue
        axes.plot([min(found), max(found)], [place + offset] * 2, color=colour, linewidth=1)
        axes.plot([statistics.median(found)], [place + offset], marker, color=colour, markersize=5,
                  markerfacecolor=face)  # fmt: skip
    axes.plot([], [], marker, color=colour, label=label, markerfacecolor=face)


Panels = LinePanels | DotPanels
