"""Figures in the form of Golden et al.'s: 3, 5 and 6 of emulated attention, 7, 8 of trainings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...pictures import Line, LinePanels, Values
from ..forward.cells import Cell
from ..forward.plan import FOUR_FORMATS, Points
from ..numbers.formats import parse_format
from ..training.training_study import FP16, NUDGES, by_seed
from .judging import LANGUAGE, study_of
from .names import inputs_of, presets_of, select, title


def forward_plots(figures: dict[str, Points]) -> dict[str, LinePanels]:
    """Returns each figure of what the study holds, by file name."""
    known: dict[str, tuple[str, Callable[[Points], LinePanels]]] = {
        "fig3": ("3", functools.partial(
            _by_preset, lambda cell: parse_format(cell.format).precision,
            ("bits of the significand", "max |flash - baseline|"), {"max": ""}, _BITS,
        )),
        "fig5a": ("5", functools.partial(
            _by_preset, lambda cell: cell.seqlen,
            ("sequence length", "max |flash - baseline|, BF16"),
            {"max": "absolute, ", "max_relative": "over max |O|, "}, (),
        )),
        "fig5b": ("5", functools.partial(
            _by_preset, lambda cell: cell.seqlen,
            ("sequence length", "flash - baseline, BF16"),
            {"mean": "mean of absolute values, ", "std": "standard deviation, "}, (),
        )),
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
    }  # fmt: skip
    return {name: draw(figures[of]) for name, (of, draw) in known.items()}


_BITS = {3.46: "3, 4\nFP8", 8: "8\nBF16", 11: "11\nFP16", 24: "24\nFP32", 53: "53\nFP64"}


def _by_preset(
    x_of: Callable[[Cell], float], labels: tuple[str, str], metrics: Mapping[str, str],
    ticks: Mapping[float, str] | tuple[()], points: Points,
) -> LinePanels:  # fmt: skip
    """A column per metric and distribution, a line per preset; ticks: none, those of the points."""
    shown = [p for p in points if p[0].inputs in ("uniform", "normal")]
    columns = {
        f"{words}inputs: {title(inputs)}": [
            Line(f"preset {preset}", [
                (x_of(cell), result["difference"][metric])
                for cell, result in select(shown, preset=preset, inputs=inputs)
                if cell.format != "tf32"
            ], number)
            for number, preset in enumerate(presets_of(shown))
        ]
        for metric, words in metrics.items()
        for inputs in inputs_of(shown)
    }  # fmt: skip
    return LinePanels(columns, labels, ticks or [x_of(cell) for cell, _ in points])


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
                (x, _in_roundoffs(cell, result["difference"]["max"]))
                for x, (cell, result) in zip(xs, group, strict=True)
                if (cell.inputs, cell.format) == (inputs, name)
            ], len(names) * number + place, style)
            for number, name in enumerate(formats)
            for place, ((case, group), style) in enumerate(
                zip(cases.items(), ("-", "--"), strict=False)
            )
        ]
        for inputs in inputs_of(points)
    }  # fmt: skip
    return LinePanels(columns, (label, "max |flash - baseline| / unit roundoff"), xs)


def _in_roundoffs(cell: Cell, values: Values) -> list[float | None]:
    """Four formats on one scale."""
    unit = parse_format(cell.format).unit_roundoff
    return [None if value is None else value / unit for value in values]


_LABELS = {
    "nudge": "one weight, one BF16 gap",
    "paper": "preset paper",
    "kernel": "preset kernel",
    "init": "other initial weights",
    "fp32": "FP32 for BF16",
    "fp16": "FP16 for FP32",
    "pure_bf16": "BF16 weights too",
    "data": "other data",
}
_DISTANCES = {
    "max_difference": "max |difference|, mean of matrices",
    "wasserstein": "Wasserstein distance, mean of matrices",
    "l2": "‖w - w'‖ / ‖w'‖",
}


def training_plots(value: dict[str, Any]) -> dict[str, LinePanels]:
    """Returns each figure, by file name."""
    prefix = "language-" if study_of(value) == LANGUAGE else ""
    runs = {name: run for name, run in value["runs"].items() if by_seed(value, name)}
    sixteen = [name for name in runs if name.startswith("fp16")]
    others = [name for name, run in runs.items()
              if run["against"] and name != "repeat" and name not in sixteen]  # fmt: skip
    found = {"fig7": _over_steps(value, others, ("max_difference", "wasserstein", "l2"))}
    if sixteen:
        found["fig8"] = _over_steps(value, sixteen, ("wasserstein", "l2"))
    return {prefix + name: panels for name, panels in found.items()}


def _label(name: str) -> str:
    if name.startswith(FP16):
        return f"{_label(name.removeprefix(FP16))}, all in FP16"
    name = "nudge" if name in NUDGES else name
    return _LABELS.get(name, title(name))


def _over_steps(
    value: dict[str, Any], names: Sequence[str], measures: tuple[str, ...]
) -> LinePanels:
    """Distances at each step after the first, of all seeds; the nudges are one line."""
    labels = list(dict.fromkeys(map(_label, names)))
    columns = {}
    for measure in measures:
        points: dict[str, dict[int, list[float | None]]] = {label: {} for label in labels}
        for name in names:
            for history in by_seed(value, name).values():
                for step, number in zip(history["steps"], history[measure], strict=True):
                    if step:
                        points[_label(name)].setdefault(step, []).append(number)
        columns[_DISTANCES[measure]] = [
            Line(label, list(points[label].items()), number) for number, label in enumerate(labels)
        ]
    return LinePanels(columns, ("optimizer steps", "distance"), sharey=False, decades=6)
