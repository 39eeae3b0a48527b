"""The figures of the study of emulated attention, in the paper's form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...pictures import DotPanels, Line, LinePanels, Panels
from ..emulate.steps import LINES, STEP_NAMES, TILING
from ..forward.cells import Cell, Result
from ..forward.plan import FOUR_FORMATS, Points
from ..numbers.formats import parse_format
from .names import inputs_of, presets_of, select, title


def forward_plots(figures: dict[str, Points]) -> dict[str, Panels]:
    """Returns each figure of what the study holds, by file name."""
    known: dict[str, tuple[str, Callable[[Points], Panels]]] = {
        "fig3": ("3", _formats),
        "fig4": ("4", _golden),
        "fig5a": ("5", _lengths_max),
        "fig5b": ("5", _lengths_mean),
        "fig5-ratio": ("5", _ratio),
        "fig6a": ("6a", functools.partial(
            _swept, lambda cell: cell.block_c, "M/4d, keys of the larger dimension",
            ("", "swapped")
        )),
        "fig6b": ("6b", functools.partial(
            _swept, lambda cell: cell.block_c**2, "area of a block, B_r B_c", ("square", "wide")
        )),
        "fig6c": ("6c", functools.partial(
            _swept, lambda cell: cell.block_c, "B_c, keys per block", ("",)
        )),
        "ablation": ("ablation", _ablation),
        "backward": ("backward", _backward),
    }  # fmt: skip
    return {name: draw(figures[of]) for name, (of, draw) in known.items() if of in figures}


def _formats(points: Points) -> LinePanels:
    shown = {
        f"inputs: {title(inputs)}": [
            Line(f"preset {preset}", [
                (parse_format(cell.format).precision, result["difference"]["max"])
                for cell, result in select(points, inputs=inputs, preset=preset)
                if cell.format != "tf32"
            ], number)
            for number, preset in enumerate(presets_of(points))
        ]
        for inputs in inputs_of(points)
    }  # fmt: skip
    ticks = {3.46: "3, 4\nFP8", 8: "8\nBF16", 11: "11\nFP16", 24: "24\nFP32", 53: "53\nFP64"}
    return LinePanels(shown, ("bits of the significand", "max |flash - baseline|"), ticks)


def _golden(points: Points) -> DotPanels:
    columns = {
        f"preset {preset}": [
            (f"{name.upper()} {kind}", {
                title(cell.inputs): _in_roundoffs((cell, result), kind)
                for cell, result in select(points, preset=preset, format=name)
            })
            for name in FOUR_FORMATS
            for kind in ("baseline", "flash")
            if (name, kind) != ("fp64", "baseline")  # it is the golden one
        ]
        for preset in presets_of(points)
    }  # fmt: skip
    rows = [title(name) for name in inputs_of(points)]
    return DotPanels(columns, rows, "max |output - FP64| / unit roundoff")


def _main(points: Points) -> Points:
    return [(c, r) for c, r in points if c.inputs in ("uniform", "normal")] or points


def _by_length(points: Points, preset: str, inputs: str, metric: str, number: int) -> Line:
    here = select(points, preset=preset, inputs=inputs)
    values = [(cell.seqlen, result["difference"][metric]) for cell, result in here]
    return Line(f"preset {preset}", values, number)


def _lengths_max(points: Points) -> LinePanels:
    return _lengths(points, "max |flash - baseline|, BF16",
                    {"max": "absolute", "max_relative": "over max |O|"})  # fmt: skip


def _lengths_mean(points: Points) -> LinePanels:
    return _lengths(points, "flash - baseline, BF16",
                    {"mean": "mean of absolute values", "std": "standard deviation"})  # fmt: skip


def _lengths(points: Points, label: str, metrics: dict[str, str]) -> LinePanels:
    shown = _main(points)
    columns = {
        f"{words}, inputs: {title(inputs)}": [
            _by_length(shown, preset, inputs, metric, number)
            for number, preset in enumerate(presets_of(shown))
        ]
        for metric, words in metrics.items()
        for inputs in inputs_of(shown)
    }
    return _over_lengths(points, columns, label)


def _ratio(points: Points) -> LinePanels:
    columns = {
        f"preset {preset}": [
            Line(title(inputs), [
                (cell.seqlen, [a / b if a is not None and b else None for a, b in
                               zip(result["flash"]["max"], result["baseline"]["max"], strict=True)])
                for cell, result in select(points, preset=preset, inputs=inputs)
            ], number)
            for number, inputs in enumerate(inputs_of(points))
        ]
        for preset in presets_of(points)
    }  # fmt: skip
    return _over_lengths(points, columns, "max deviation, flash / baseline", (1, 10))


def _over_lengths(
    points: Points, columns: Any, label: str, levels: tuple[float, ...] = ()
) -> LinePanels:
    lengths = [cell.seqlen for cell, _ in points]
    return LinePanels(columns, ("sequence length", label), lengths, levels)


def _swept(
    x_of: Callable[[Cell], float], label: str, names: tuple[str, ...], points: Points
) -> LinePanels:
    """A column per distribution and a line per case of BF16 and FP16; x from the first case."""
    formats = FOUR_FORMATS if len(names) == 1 else FOUR_FORMATS[:2]
    cases = {name: points[number :: len(names)] for number, name in enumerate(names)}
    xs = [x_of(cell) for cell, _ in cases[names[0]]]
    columns = {
        f"inputs: {title(inputs)}": [
            Line(f"{name.upper()} {case}".strip(), [
                (x, _in_roundoffs(point, "difference"))
                for x, point in zip(xs, group, strict=True)
                if (point[0].inputs, point[0].format) == (inputs, name)
            ], len(names) * number + place, style)
            for number, name in enumerate(formats)
            for place, ((case, group), style) in enumerate(
                zip(cases.items(), ("-", "--"), strict=False)
            )
        ]
        for inputs in inputs_of(points)
    }  # fmt: skip
    return LinePanels(columns, (label, "max |flash - baseline| / unit roundoff"), xs)


def _in_roundoffs(point: tuple[Cell, Result], pair: str) -> list[float | None]:
    """The largest deviation in unit roundoffs: four formats on one scale."""
    cell, result = point
    unit = parse_format(cell.format).unit_roundoff
    return [None if value is None else value / unit for value in result[pair]["max"]]


def _ablation(points: Points) -> DotPanels:
    groups = {TILING: "all that tiling adds", LINES: "within lines", "": "all steps"}

    def named(step: str) -> str:
        return groups.get(step, step.replace("_", " "))

    columns = {
        f"inputs: {title(inputs)}": [
            (label, {
                named(getattr(c, kind)): r["flash"]["max"]
                for c, r in select(points, inputs=inputs, **other)
            })
            for kind, label, other in (("exempt", "every step but this", {"only": ""}),
                                       ("only", "this step alone", {"exempt": ""}))
        ]
        for inputs in inputs_of(points)
    }  # fmt: skip
    steps = [named(step) for step in ("", *STEP_NAMES, TILING, LINES)]
    return DotPanels(columns, steps, "max |flash - FP64|, BF16")


def _backward(points: Points) -> DotPanels:
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
    return DotPanels(columns, rows, "‖deviation‖ / ‖gradient‖")
