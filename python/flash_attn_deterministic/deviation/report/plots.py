"""Figures of a study, as SVG files; matplotlib is imported here and only when plotting."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import FlashAttnError
from ..numbers.intervals import finite
from ..study.files import write_text

# Okabe and Ito's colours: told apart by most people, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Draw = Callable[[Any], Any]  # pyplot -> figure


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


def draw_all(drawers: dict[str, Draw], folder: Path) -> list[Path]:
    """Draws figures into a folder, as NAME.svg, and returns the files."""
    pyplot = load_pyplot()
    written = []
    for name, draw in drawers.items():
        path = folder / f"{name}.svg"
        figure = draw(pyplot)
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


def line(
    axes: Any,
    points: Sequence[tuple[float, Sequence[float | None]]],
    number: int,
    label: str,
    style: str = "-",
    hollow: bool = False,
) -> None:
    """Draws medians over draws with a band from the least to the largest.

    Args:
        axes: where.
        points: (x, values of all draws).
        number: which colour and marker.
        label: in the legend.
        style: of the line.
        hollow: whether markers are empty.
    """
    shown = [(x, finite(values)) for x, values in sorted(points, key=lambda point: point[0])]
    shown = [(x, values) for x, values in shown if values]
    colour = COLOURS[number % 8]
    if axes.get_yscale() == "log":
        # A logarithmic axis has no place for 0: the panel says what it can't show.
        left_out = sum(value <= 0 for _, values in shown for value in values)
        if left_out:
            total = sum(len(values) for _, values in shown)
            text = f"{label}: {left_out} of {total} are 0 or less"
            axes.text(0.01, 0.01 + 0.05 * len(axes.texts), text, color=colour, fontsize=6,
                      transform=axes.transAxes)  # fmt: skip
        shown = [(x, values) for x, values in shown if statistics.median(values) > 0]
    xs = [x for x, _ in shown]
    axes.plot(
        xs, [statistics.median(values) for _, values in shown], style,
        color=colour, marker=MARKERS[number % 8], markersize=4.5, linewidth=1.4, label=label,
        markerfacecolor="white" if hollow else colour,
    )  # fmt: skip
    axes.fill_between(
        xs, [_least(values, axes.get_yscale()) for _, values in shown],
        [max(values) for _, values in shown],
        color=colour, alpha=0.13, linewidth=0,
    )  # fmt: skip


def _least(values: Sequence[float], scale: str) -> float:
    """The least value, of those that the axis can show."""
    return min(value for value in values if scale != "log" or value > 0)


def lengths_axis(axes: Any, lengths: Iterable[float], label: str) -> None:
    """A logarithmic axis of powers of two that names each of them."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def legend_below(figure: Any, axes: Any, columns: int) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


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


def panels(
    pyplot: Any, titles: Sequence[str], height: float = 3.2, rows: int = 1, width: float = 4.1
) -> tuple[Any, list[list[Any]]]:
    """Makes a grid of panels with shared axes: a column per title, a row per quantity."""
    figure, axes = pyplot.subplots(
        rows, len(titles), figsize=(width * len(titles), height), sharey="row", sharex=True,
        squeeze=False,
    )  # fmt: skip
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title)
    return figure, [list(row) for row in axes]


Dots = Sequence[tuple[str, Mapping[str, Sequence[float | None]]]]  # labels, and values of each row


def dot_panels(
    pyplot: Any, shown: Mapping[str, Dots], rows: Sequence[str], label: str, scale: str = "log"
) -> Any:
    """Makes a figure of medians as points on named rows, with bars from the least to the largest.

    Args:
        pyplot: matplotlib's.
        shown: of each panel, by its title.
        rows: their names, from above.
        label: of the x axes.
        scale: of the x axes.
    """
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    most = max(len(series) for series in shown.values())
    each = 0.26 if len(rows) > 20 else max(0.26, 0.07 * most)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(6.4 if columns == 1 else 4.1 * columns,
                                 lines * (1.2 + each * len(rows))),
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for axes, (title, series) in zip(grid.flat, shown.items(), strict=False):
        axes.set_title(title)
        axes.set_xscale(scale)
        axes.set_xlabel(label)
        for number, (name, values) in enumerate(series):
            offset = 0.8 * ((number + 0.5) / len(series) - 0.5)
            _dots(axes, rows, values, number, name, offset)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", labelsize=8 if len(rows) < 20 else 7)
        if scale != "log":
            axes.axvline(0, color="#333333", linewidth=0.8)
    legend_below(figure, grid[0][0], 3 if columns == 1 else 5)
    return figure


def _dots(
    axes: Any, rows: Sequence[str], values: Mapping[str, Sequence[float | None]], number: int,
    label: str, offset: float,
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
