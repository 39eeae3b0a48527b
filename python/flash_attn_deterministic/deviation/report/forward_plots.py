"""The figures of the study of emulated attention, in the paper's form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..emulate.steps import STEP_NAMES
from ..forward.cells import Cell, Result
from ..forward.plan import FOUR_FORMATS, LINES, ON_CHIP, TILING, Points
from ..numbers.formats import parse_format
from .names import inputs_of, presets_of, select, title
from .plots import Draw, dot_panels, legend_below, lengths_axis, line, panels

_Figure = Callable[[Any, Points], Any]


def forward_plots(figures: dict[str, Points]) -> dict[str, Draw]:
    """Returns what draws each figure that the study holds, by file name."""
    known: dict[str, dict[str, _Figure]] = {
        "3": {"fig3": _formats},
        "4": {"fig4": _golden},
        "5": {"fig5a": _lengths_max, "fig5b": _lengths_mean, "fig5-ratio": _ratio},
        "6a": {"fig6a": _swapped},
        "6b": {"fig6b": _square},
        "6c": {"fig6c": _larger},
        "ablation": {"ablation": _ablation},
        "bias": {"bias": _bias},
        "backward": {"backward": _backward},
    }
    return {
        name: functools.partial(_call, function, points)
        for figure, points in figures.items()
        for name, function in known.get(figure, {}).items()
    }


def _call(function: _Figure, points: Points, pyplot: Any) -> Any:
    return function(pyplot, points)


def _by_inputs(
    pyplot: Any, points: Points, rows: int = 1, height: float = 3.2
) -> tuple[Any, list[tuple[str, list[Any]]]]:
    """A column of panels per distribution."""
    names = inputs_of(points)
    figure, grid = panels(pyplot, [f"inputs: {title(name)}" for name in names], height, rows)
    for row in grid:
        for panel in row:
            panel.set_yscale("log")
    return figure, [(name, [row[n] for row in grid]) for n, name in enumerate(names)]


def _formats(pyplot: Any, points: Points) -> Any:
    figure, columns = _by_inputs(pyplot, points)
    for inputs, (axes,) in columns:
        for number, preset in enumerate(presets_of(points)):
            swept = [
                (parse_format(c.format).precision, r["difference"]["max"])
                for c, r in select(points, inputs=inputs, preset=preset)
                if c.format != "tf32"
            ]
            line(axes, swept, number, f"preset {preset}")
        axes.set_xlabel("bits of the significand")
        axes.set_xscale("log")
        ticks = {3.46: "3, 4\nFP8", 8: "8\nBF16", 11: "11\nFP16", 24: "24\nFP32", 53: "53\nFP64"}
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7.5)
        axes.minorticks_off()
    columns[0][1][0].set_ylabel("max |flash - baseline|")
    legend_below(figure, columns[0][1][0], 3)
    return figure


def _golden(pyplot: Any, points: Points) -> Any:
    columns = {
        f"preset {preset}": [
            (f"{name.upper()} {kind}", {
                title(cell.inputs): result[kind]["max"]
                for cell, result in select(points, preset=preset, format=name)
            })
            for name in FOUR_FORMATS
            for kind in ("baseline", "flash")
            if (name, kind) != ("fp64", "baseline")  # it is the golden one
        ]
        for preset in presets_of(points)
    }  # fmt: skip
    rows = [title(name) for name in inputs_of(points)]
    return dot_panels(pyplot, columns, rows, "max |output - FP64|")


def _main(points: Points) -> Points:
    return [(c, r) for c, r in points if c.inputs in ("uniform", "normal")] or points


def _lengths_max(pyplot: Any, points: Points) -> Any:
    shown = _main(points)
    figure, columns = _by_inputs(pyplot, shown)
    for inputs, (axes,) in columns:
        for number, preset in enumerate(presets_of(shown)):
            here = select(shown, inputs=inputs, preset=preset)
            line(axes, [(c.seqlen, r["difference"]["max"]) for c, r in here], number,
                 f"{preset}: max |flash - baseline|")  # fmt: skip
        first = presets_of(shown)[0]
        here = select(shown, inputs=inputs, preset=first)
        relative = [(c.seqlen, r["difference"]["max_relative"]) for c, r in here]
        line(axes, relative, 6, f"{first}: the same / max |O|", "--", True)
        lengths_axis(axes, [c.seqlen for c, _ in shown], "sequence length")
    columns[0][1][0].set_ylabel("difference, BF16")
    legend_below(figure, columns[0][1][0], 2)
    return figure


def _lengths_mean(pyplot: Any, points: Points) -> Any:
    shown = _main(points)
    figure, columns = _by_inputs(pyplot, shown, rows=2, height=5.2)
    labels = (("mean", "mean |flash - baseline|"), ("std", "std of flash - baseline"))
    for inputs, grid in columns:
        for panel, (metric, label) in zip(grid, labels, strict=True):
            for number, preset in enumerate(presets_of(shown)):
                here = select(shown, inputs=inputs, preset=preset)
                line(panel, [(c.seqlen, r["difference"][metric]) for c, r in here], number,
                     f"preset {preset}")  # fmt: skip
            if inputs == columns[0][0]:
                panel.set_ylabel(f"{label}, BF16")
        lengths_axis(grid[1], [c.seqlen for c, _ in shown], "sequence length")
    legend_below(figure, columns[0][1][0], 3)
    return figure


def _ratio(pyplot: Any, points: Points) -> Any:
    presets = presets_of(points)
    figure, (row,) = panels(pyplot, [f"preset {preset}" for preset in presets])
    for preset, panel in zip(presets, row, strict=True):
        panel.set_yscale("log")
        for number, inputs in enumerate(inputs_of(points)):
            here = [
                (c.seqlen, [a / b if a is not None and b else None for a, b in
                            zip(r["flash"]["max"], r["baseline"]["max"], strict=True)])
                for c, r in select(points, preset=preset, inputs=inputs)
            ]  # fmt: skip
            if here or preset == presets[0]:
                line(panel, here, number, title(inputs))
        panel.axhline(1, color="#666666", linewidth=0.8)
        panel.axhline(10, color="#666666", linewidth=0.8, linestyle=":")
        lengths_axis(panel, [c.seqlen for c, _ in points], "sequence length")
        panel.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
        panel.yaxis.minorticks_off()
    row[0].set_ylabel("max deviation, flash / baseline")
    legend_below(figure, row[0], 5)
    return figure


def _swept(
    pyplot: Any, points: Points, cases: tuple[tuple[str, Points], ...],
    x_of: Callable[[Any], float], label: str,
) -> Any:  # fmt: skip
    """A column per distribution and a line per format and case; x from the first case's cells."""
    figure, columns = _by_inputs(pyplot, points, height=3.8)
    styles = ("-", "--", ":")
    for inputs, (axes,) in columns:
        for number, name in enumerate(FOUR_FORMATS):
            for place, (case, group) in enumerate(cases):
                line(
                    axes,
                    [
                        (x_of(first[0]), _in_roundoffs(other))
                        for first, other in zip(cases[0][1], group, strict=True)
                        if (first[0].inputs, first[0].format) == (inputs, name)
                    ],
                    number, f"{name.upper()} {case}", styles[place], place > 0,
                )  # fmt: skip
        lengths_axis(axes, [x_of(c) for c, _ in cases[0][1]], label)
    columns[0][1][0].set_ylabel("max |flash - baseline| / unit roundoff")
    legend_below(figure, columns[0][1][0], 4)
    return figure


def _in_roundoffs(point: tuple[Cell, Result]) -> list[float | None]:
    """The largest difference in unit roundoffs: four formats on one scale."""
    cell, result = point
    unit = parse_format(cell.format).unit_roundoff
    return [None if value is None else value / unit for value in result["difference"]["max"]]


def _swapped(pyplot: Any, points: Points) -> Any:
    cases = (
        ("as the paper", points[0::3]),
        ("sizes exchanged", points[1::3]),
        ("loops exchanged", [p for p in points[2::3] if p[0].exempt == ON_CHIP]),
    )
    return _swept(pyplot, points, cases, lambda cell: cell.block_c, "ceil(M/4d)")


def _square(pyplot: Any, points: Points) -> Any:
    cases = (
        ("square", points[0::3]),
        ("wide", points[1::3]),
        ("tall", points[2::3]),
    )
    return _swept(
        pyplot, points, cases, lambda cell: cell.block_r * cell.block_c, "area B_r x B_c of a tile"
    )


def _larger(pyplot: Any, points: Points) -> Any:
    return _swept(pyplot, points, (("", points),), lambda cell: cell.block_c,
                  "B_c, keys per block")  # fmt: skip


def _ablation(pyplot: Any, points: Points) -> Any:
    groups = {TILING: "all that tiling adds", LINES: "within lines", "": "all steps"}
    columns = {
        f"inputs: {title(inputs)}": [
            (label, {
                groups.get(getattr(c, kind), getattr(c, kind).replace("_", " ")): r["flash"]["max"]
                for c, r in select(points, inputs=inputs, **other)
            })
            for kind, label, other in (("exempt", "every step but this", {"only": ""}),
                                       ("only", "this step alone", {"exempt": ""}))
        ]
        for inputs in inputs_of(points)
    }  # fmt: skip
    steps = [groups.get(s, s.replace("_", " ")) for s in ("", *STEP_NAMES, TILING, LINES)]
    return dot_panels(pyplot, columns, steps, "max |flash - FP64|, BF16")


def _bias(pyplot: Any, points: Points) -> Any:
    cases = (
        ("V of one sign", "bf16", "one_sign", False, "product"),
        ("maximum moved up", "bf16", "one_sign", True, "product"),
        ("stochastic rounding", "bf16:sr", "one_sign", False, "product"),
        ("V of both signs", "bf16", "two_signs", False, "product"),
        ("divided by l first", "bf16", "one_sign", False, "output"),
        ("moved up, divided by l first", "bf16", "one_sign", True, "output"),
    )
    series = [
        (label, {
            f"{cell.ties} key{'s' * (cell.ties > 1)}": result[place]["away"]
            for cell, result in select(points, format=name, inputs=inputs, shifted=shifted)
        })
        for label, name, inputs, shifted, place in cases
    ]  # fmt: skip
    shown = {"by the keys at a row's maximum (P = 1)": series}
    label = "mean error away from 0, gaps of BF16"
    return dot_panels(pyplot, shown, list(series[0][1]), label, "linear")


def _backward(pyplot: Any, points: Points) -> Any:
    seqlen = max(cell.seqlen for cell, _ in points)
    shown = select(points, seqlen=seqlen)
    cases = {"explicit": "explicit attention", "rounded": "D from rounded O",
             "residual": "O and residual", "residual8": "8-bit residual",
             "exact": "D from exact O"}  # fmt: skip
    columns = {
        f"{gradient}, length {seqlen}": [
            (label, {
                f"{title(cell.inputs)}, {cell.format.upper()}":
                result[f"{place} {gradient}"]["relative"]
                for cell, result in shown
            })
            for place, label in cases.items()
        ]
        for gradient in ("dq", "dk", "dv")
    }  # fmt: skip
    rows = [f"{title(cell.inputs)}, {cell.format.upper()}" for cell, _ in shown]
    return dot_panels(pyplot, columns, rows, "‖deviation‖ / ‖gradient‖")
