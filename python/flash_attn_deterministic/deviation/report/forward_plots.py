"""The figures of the forward study, in the paper's form."""

from __future__ import annotations

import functools
from typing import Any

from .cells import Cell
from .formats import parse_format
from .inputs import DISTRIBUTIONS
from .plots import (
    COLOURS,
    MARKERS,
    Draw,
    finite,
    legend_below,
    lengths_axis,
    line,
    median,
)
from .steps import STEP_NAMES

Points = list[tuple[Cell, Any]]

_TITLES = {
    "uniform": "uniform [0, 1)",
    "normal": "normal (0, 1)",
    "normal_mean": "normal (1, 1)",
    "scaled_logits": "normal, 4 q",
    "outliers": "normal with outliers",
}


def forward_plots(figures: dict[str, Points]) -> dict[str, Draw]:
    """Returns what draws each figure that the study holds, by file name."""
    known: dict[str, dict[str, Any]] = {
        "3": {"fig3": _formats},
        "4": {"fig4": _golden},
        "5": {"fig5a": _lengths_max, "fig5b": _lengths_mean, "fig5-ratio": _ratio},
        "6a": {"fig6a": lambda p, points: _shapes(p, points, "swapped")},
        "6b": {"fig6b": lambda p, points: _shapes(p, points, "square")},
        "6c": {"fig6c": _larger},
        "ablation": {"ablation": _ablation},
        "stochastic": {"stochastic": _stochastic},
        "bias": {"bias": _bias},
    }
    drawers: dict[str, Draw] = {}
    for figure, points in figures.items():
        for name, function in known.get(figure, {}).items():
            drawers[name] = functools.partial(_call, function, points)
    return drawers


def _call(function: Any, points: Points, pyplot: Any) -> Any:
    return function(pyplot, points)


def inputs_of(points: Points) -> list[str]:
    """Returns the distributions of a figure's cells, in a fixed order."""
    found = {cell.inputs for cell, _ in points}
    order = [name for name in DISTRIBUTIONS if name in found]
    return order + sorted(found - set(order))


def presets_of(points: Points) -> list[str]:
    return [p for p in ("paper", "kernel", "tree") if any(c.preset == p for c, _ in points)]


def title(inputs: str) -> str:
    return _TITLES.get(inputs, inputs)


def _panels(pyplot: Any, points: Points, height: float = 3.1) -> tuple[Any, list[tuple[str, Any]]]:
    names = inputs_of(points)
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4.1 * len(names), height), sharey=True, squeeze=False
    )
    for name, panel in zip(names, axes[0], strict=True):
        panel.set_title(f"inputs: {title(name)}")
    return figure, list(zip(names, axes[0], strict=True))


def _formats(pyplot: Any, points: Points) -> Any:
    figure, panels = _panels(pyplot, points)
    for inputs, axes in panels:
        axes.set_yscale("log")
        for number, preset in enumerate(presets_of(points)):
            here = [(c, r) for c, r in points if c.inputs == inputs and c.preset == preset]
            swept = [
                (parse_format(c.format).precision, r["difference"]["max"])
                for c, r in here
                if c.format not in ("tf32",)
            ]
            line(axes, swept, number, f"preset {preset}")
        axes.set_xlabel("bits of the significand")
        axes.set_xscale("log")
        ticks = {3.46: "3, 4\nFP8", 8: "8\nBF16", 11: "11\nFP16", 24: "24\nFP32", 53: "53\nFP64"}
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7.5)
        axes.minorticks_off()
    panels[0][1].set_ylabel("max |flash - baseline|")
    panels[0][1].legend()
    return figure


def _golden(pyplot: Any, points: Points) -> Any:
    presets, names = presets_of(points), inputs_of(points)
    figure, axes = pyplot.subplots(
        1, len(presets), figsize=(4.1 * len(presets), 3.4), sharey=True, squeeze=False
    )
    for preset, panel in zip(presets, axes[0], strict=True):
        panel.set_yscale("log")
        panel.set_title(f"preset {preset}")
        for number, name in enumerate(("bf16", "fp16", "fp32")):
            for kind, offset in (("baseline", -0.09), ("flash", 0.09)):
                for place, inputs in enumerate(names):
                    values = [
                        r[kind]["max"] for c, r in points
                        if (c.preset, c.format, c.inputs) == (preset, name, inputs)
                    ]  # fmt: skip
                    there = finite(values[0]) if values else []
                    if not there:
                        continue
                    x, middle = place + offset + 0.26 * (number - 1), median(there)
                    panel.plot([x, x], [min(there), max(there)], color=COLOURS[number], linewidth=1)
                    panel.plot(
                        [x], [middle], MARKERS[number], color=COLOURS[number], markersize=5,
                        markerfacecolor="white" if kind == "baseline" else COLOURS[number],
                        label=f"{name.upper()} {kind}" if place == 0 else None,
                    )  # fmt: skip
        panel.set_xticks(range(len(names)), [title(n).replace(" ", "\n", 1) for n in names])
        panel.tick_params(axis="x", labelsize=7.5)
        panel.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("max |output - FP64|")
    legend_below(figure, axes[0][0], 6)
    return figure


def _lengths_max(pyplot: Any, points: Points) -> Any:
    shown = [(c, r) for c, r in points if c.inputs in ("uniform", "normal")] or points
    figure, panels = _panels(pyplot, shown)
    for inputs, axes in panels:
        axes.set_yscale("log")
        for number, preset in enumerate(presets_of(shown)):
            here = [(c, r) for c, r in shown if c.inputs == inputs and c.preset == preset]
            line(axes, [(c.seqlen, r["difference"]["max"]) for c, r in here], number,
                 f"{preset}: max |flash - baseline|")  # fmt: skip
        relative = [
            (c.seqlen, r["difference"]["max_relative"]) for c, r in shown
            if c.inputs == inputs and c.preset == presets_of(shown)[0]
        ]  # fmt: skip
        line(axes, relative, 6, f"{presets_of(shown)[0]}: the same / max |O|", "--", True)
        lengths_axis(axes, [c.seqlen for c, _ in shown], "sequence length")
    panels[0][1].set_ylabel("difference, BF16")
    legend_below(figure, panels[0][1], 2)
    return figure


def _lengths_mean(pyplot: Any, points: Points) -> Any:
    shown = [(c, r) for c, r in points if c.inputs in ("uniform", "normal")] or points
    names, rows = (
        inputs_of(shown),
        (("mean", "mean |output - FP64|"), ("std", "standard deviation")),
    )
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(4.1 * len(names), 5.2), sharex=True, sharey="row", squeeze=False
    )
    for column, inputs in enumerate(names):
        axes[0][column].set_title(f"inputs: {title(inputs)}")
        for row, (metric, label) in enumerate(rows):
            panel = axes[row][column]
            panel.set_yscale("log")
            for number, preset in enumerate(presets_of(shown)):
                here = [(c, r) for c, r in shown if c.inputs == inputs and c.preset == preset]
                line(panel, [(c.seqlen, r["flash"][metric]) for c, r in here], number,
                     f"flash, preset {preset}")  # fmt: skip
            first = presets_of(shown)[0]  # any: the baseline is the same
            here = [(c, r) for c, r in shown if (c.inputs, c.preset) == (inputs, first)]
            line(panel, [(c.seqlen, r["baseline"][metric]) for c, r in here], 6, "baseline", "--",
                 True)  # fmt: skip
            if column == 0:
                panel.set_ylabel(label)
        lengths_axis(axes[1][column], [c.seqlen for c, _ in shown], "sequence length")
    legend_below(figure, axes[0][0], 4)
    return figure


def ratios(points: Points, metric: str = "max") -> list[tuple[Cell, list[float | None]]]:
    """Returns flash's deviation over baseline's of each cell, draw by draw."""
    result = []
    for cell, found in points:
        pairs = zip(found["flash"][metric], found["baseline"][metric], strict=True)
        result.append((cell, [f / b if f is not None and b else None for f, b in pairs]))
    return result


def _ratio(pyplot: Any, points: Points) -> Any:
    presets = presets_of(points)
    figure, axes = pyplot.subplots(
        1, len(presets), figsize=(4.1 * len(presets), 3.2), sharey=True, squeeze=False
    )
    names = inputs_of(points)
    for preset, panel in zip(presets, axes[0], strict=True):
        panel.set_yscale("log")
        panel.set_title(f"preset {preset}")
        for number, inputs in enumerate(names):
            here = [(c, r) for c, r in ratios(points) if (c.preset, c.inputs) == (preset, inputs)]
            if here:
                line(panel, [(c.seqlen, values) for c, values in here], number, title(inputs))
        panel.axhline(1, color="#666666", linewidth=0.8)
        panel.axhline(10, color="#666666", linewidth=0.8, linestyle=":")
        lengths_axis(panel, [c.seqlen for c, _ in points], "sequence length")
        panel.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
        panel.yaxis.minorticks_off()
    axes[0][0].set_ylabel("max deviation, flash / baseline")
    legend_below(figure, axes[0][0], 5)
    return figure


def _shapes(pyplot: Any, points: Points, other: str) -> Any:
    """Both shapes of a memory size at its B_c = M / 4d."""
    figure, panels = _panels(pyplot, points)
    for inputs, axes in panels:
        axes.set_yscale("log")
        here = [(c, r) for c, r in points if c.inputs == inputs]
        # A pair of cells per memory size, in the order of the plan.
        pairs = list(zip(here[::2], here[1::2], strict=True))
        for number, (label, index) in enumerate((("B_c = ceil(M/4d)", 0), (other, 1))):
            swept = [(pair[0][0].block_c, pair[index][1]["flash"]["max"]) for pair in pairs]
            line(axes, swept, number, label, "-" if index == 0 else "--", index == 1)
        lengths_axis(axes, [pair[0][0].block_c for pair in pairs], "ceil(M/4d)")
    panels[0][1].set_ylabel("max |flash - FP64|, BF16")
    panels[0][1].legend()
    return figure


def _larger(pyplot: Any, points: Points) -> Any:
    figure, panels = _panels(pyplot, points)
    formats = sorted({c.format for c, _ in points})
    for inputs, axes in panels:
        axes.set_yscale("log")
        for number, name in enumerate(formats):
            here = [(c, r) for c, r in points if (c.inputs, c.format) == (inputs, name)]
            line(axes, [(c.block_c, r["flash"]["max"]) for c, r in here], number,
                 f"{name.upper()} flash")  # fmt: skip
            line(axes, [(c.block_c, r["baseline"]["max"]) for c, r in here], number,
                 f"{name.upper()} baseline", "--", True)  # fmt: skip
        lengths_axis(axes, [c.block_c for c, _ in points], "B_c, keys per block")
    panels[0][1].set_ylabel("max |output - FP64|")
    legend_below(figure, panels[0][1], 4)
    return figure


def _ablation(pyplot: Any, points: Points) -> Any:
    shown = [(c, r) for c, r in points if c.preset == presets_of(points)[0]]
    names = inputs_of(shown)
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4.3 * len(names), 3.6), sharey=True, sharex=True, squeeze=False
    )
    for inputs, panel in zip(names, axes[0], strict=True):
        here = [(c, r) for c, r in shown if c.inputs == inputs]
        whole = next(median(r["flash"]["max"]) for c, r in here if not c.only and not c.exempt)
        steps = [s for s in STEP_NAMES if any(c.only == s for c, _ in here)]
        for kind, offset, colour, label in (
            ("only", -0.2, COLOURS[1], "this step alone rounded"),
            ("exempt", 0.2, COLOURS[0], "every step but this one"),
        ):
            values = {getattr(c, kind): median(r["flash"]["max"]) for c, r in here}
            shown_steps = [step for step in steps if values.get(step)]
            panel.barh(
                [steps.index(step) + offset for step in shown_steps],
                [values[step] for step in shown_steps],
                0.38, color=colour, label=label, left=1e-8,
            )  # fmt: skip
        panel.set_xscale("log")
        if whole:
            panel.axvline(whole, color="#333333", linewidth=1, linestyle=":", label="all steps")
        panel.set_title(f"inputs: {title(inputs)}")
        panel.set_yticks(range(len(steps)), [step.replace("_", " ") for step in steps])
        panel.set_xlabel("max |flash - FP64|, BF16")
        panel.grid(axis="y", visible=False)
    axes[0][0].invert_yaxis()
    legend_below(figure, axes[0][0], 3)
    return figure


def _stochastic(pyplot: Any, points: Points) -> Any:
    names = inputs_of(points)
    rows = (("rmse", "RMSE"), ("bias", "|mean signed deviation|"))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(4.1 * len(names), 5.0), sharex=True, sharey="row", squeeze=False
    )
    for column, inputs in enumerate(names):
        axes[0][column].set_title(f"inputs: {title(inputs)}")
        for row, (metric, label) in enumerate(rows):
            panel = axes[row][column]
            panel.set_yscale("log")
            for number, (name, text) in enumerate(
                (("bf16", "nearest, ties to even"), ("bf16:sr", "stochastic"))
            ):
                here = [(c, r) for c, r in points if (c.inputs, c.format) == (inputs, name)]
                line(panel, [(c.seqlen, [abs(x) for x in finite(r["flash"][metric])])
                             for c, r in here], number, text)  # fmt: skip
            if column == 0:
                panel.set_ylabel(f"{label}, BF16")
        lengths_axis(axes[1][column], [c.seqlen for c, _ in points], "sequence length")
    legend_below(figure, axes[0][0], 2)
    return figure


def _bias(pyplot: Any, points: Points) -> Any:
    figure, axes = pyplot.subplots(1, 1, figsize=(6.2, 3.3))
    cases = (
        ("V of one sign", ("bf16", "one_sign", False), "product"),
        ("V of one sign, maximum moved up", ("bf16", "one_sign", True), "product"),
        ("V of one sign, stochastic rounding", ("bf16:sr", "one_sign", False), "product"),
        ("V of one sign, divided by l first", ("bf16", "one_sign", False), "output"),
        ("V of both signs", ("bf16", "two_signs", False), "product"),
    )
    ties = sorted({c.ties for c, _ in points})
    for number, (label, case, place) in enumerate(cases):
        values = [
            next(r[place]["away"] for c, r in points
                 if (c.format, c.inputs, c.shifted) == case and c.ties == tie)
            for tie in ties
        ]  # fmt: skip
        xs = [x + 0.16 * (number - 2) for x in range(len(ties))]
        axes.bar(xs, [median(v) for v in values], 0.15, color=COLOURS[number], label=label)
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.set_xticks(range(len(ties)), [str(tie) for tie in ties])
    axes.set_xlabel("keys that share the maximum of a row (P = 1)")
    axes.set_ylabel("mean error away from 0, ULP")
    axes.grid(axis="x", visible=False)
    axes.legend()
    return figure
