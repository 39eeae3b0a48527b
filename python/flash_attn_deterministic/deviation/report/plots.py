"""Figures of a study, as SVG files; matplotlib is imported here and only when plotting."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import FlashAttnError
from .files import write_text

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
            "matplotlib is needed for plots and is not installed; install "
            "flash-attn-deterministic[deviation], or give --no-plots where the command has it"
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


def plot_folder(folder: Path) -> list[Path]:
    """Draws the figures of whatever results a folder holds, into its folder `plots`.

    Returns:
        The files written.
    """
    from . import forward, kernels
    from .forward_plots import forward_plots
    from .kernel_plots import kernel_plots
    from .training import study
    from .training_plots import training_plots

    pyplot = load_pyplot()
    drawers: dict[str, Draw] = {}
    if (folder / forward.RESULT_FILE).exists():
        drawers.update(forward_plots(forward.read_forward(folder / forward.RESULT_FILE)))
    if (folder / kernels.RESULT_FILE).exists():
        drawers.update(kernel_plots(kernels.read_kernels(folder / kernels.RESULT_FILE)))
    if (folder / study.RESULT_FILE).exists():
        drawers.update(training_plots(study.read_training(folder / study.RESULT_FILE)))
    written = []
    for name, draw in drawers.items():
        path = folder / "plots" / f"{name}.svg"
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


def finite(values: Iterable[float | None]) -> list[float]:
    """Returns the values that are there: JSON has null where a result was infinite or NaN."""
    return [value for value in values if value is not None]


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median; None where a value is missing, which is then the study's result."""
    listed = list(values)
    there = finite(listed)
    return statistics.median(there) if there and len(there) == len(listed) else None


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
        label: in the legend; says so where all values are 0, which a logarithmic axis can't show.
        style: of the line.
        hollow: whether markers are empty.
    """
    shown = [(x, finite(values)) for x, values in sorted(points, key=lambda point: point[0])]
    shown = [(x, values) for x, values in shown if values]
    logarithmic = axes.get_yscale() == "log"
    if logarithmic and shown and not any(value for _, values in shown for value in values):
        axes.plot([], [], style, color=COLOURS[number % 8], label=f"{label}: exactly 0")
        return
    if logarithmic:
        shown = [(x, values) for x, values in shown if min(values) > 0]
    xs = [x for x, _ in shown]
    colour = COLOURS[number % 8]
    axes.plot(
        xs, [statistics.median(values) for _, values in shown], style,
        color=colour, marker=MARKERS[number % 8], markersize=4.5, linewidth=1.4, label=label,
        markerfacecolor="white" if hollow else colour,
    )  # fmt: skip
    axes.fill_between(
        xs, [min(values) for _, values in shown], [max(values) for _, values in shown],
        color=colour, alpha=0.13, linewidth=0,
    )  # fmt: skip


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
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        named = "Fixed" in type(axis.get_major_locator()).__name__
        if axis.get_scale() != "log" or named:
            continue
        ticks = _log_ticks(*getattr(axes, f"get_{name}lim")())
        axis.set_ticks(ticks, [_power(tick) for tick in ticks])
        axis.minorticks_off()


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 of each decade, every decade, or every second one, as there is room."""
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades < 2.5 else (1,)
    step = 1 if decades < 9 else 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers if power % step == 0 for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def _power(tick: float) -> str:
    if 0.01 <= tick <= 10000:
        return f"{tick:g}"
    return f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e")
