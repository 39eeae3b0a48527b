"""The figures of the training study."""

from __future__ import annotations

from typing import Any

from .plots import COLOURS, MARKERS, Draw, legend_below

_LABELS = {
    "repeat": "repeat (control)",
    "flash": "flash, preset paper",
    "sdpa": "torch's kernel",
    "ours": "this wheel",
    "init": "other initial weights",
    "fp32": "FP32 instead of BF16",
    "fp16": "FP16 instead of BF16",
    "pure_bf16": "BF16 weights too",
    "data": "other data (control)",
}
_MEASURES = {
    "max_difference": "max |difference|",
    "wasserstein": "Wasserstein distance",
    "l1": "mean |difference|",
}


def training_plots(value: dict[str, Any]) -> dict[str, Draw]:
    """Returns what draws each figure, by file name."""
    runs = value["runs"]
    drawers: dict[str, Draw] = {
        "fig7": lambda pyplot: _over_steps(pyplot, runs, "max_difference"),
        "fig8": lambda pyplot: _over_steps(pyplot, runs, "wasserstein"),
        "training-l1": lambda pyplot: _over_steps(pyplot, runs, "l1"),
        "training-loss": lambda pyplot: _loss(pyplot, runs),
    }
    if value.get("live"):
        drawers["live"] = lambda pyplot: _live(pyplot, value["live"])
    return drawers


def mean_over_matrices(history: dict[str, Any], measure: str) -> list[float]:
    """Returns the mean over the weight matrices, at each step."""
    return [sum(values) / len(values) for values in history[measure]]


def without_start(values: list[float]) -> list[float]:
    """Returns the values less the first: what the training added."""
    return [value - values[0] for value in values]


def _over_steps(pyplot: Any, runs: dict[str, Any], measure: str) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(8.6, 3.5), sharex=True)
    for panel, subtract in zip(axes, (False, True), strict=True):
        panel.set_xscale("log")
        panel.set_yscale("log")
        for number, name in enumerate(name for name in runs if name != "base"):
            history = runs[name]["history"]
            values = mean_over_matrices(history, measure)
            values = without_start(values) if subtract else values
            points = [
                (step, value)
                for step, value in zip(history["steps"], values, strict=True)
                if step > 0 and value > 0
            ]
            label = _LABELS.get(name, name)
            label += "" if points or subtract else ": exactly 0"
            panel.plot(
                [step for step, _ in points], [value for _, value in points],
                color=COLOURS[number % 8], marker=MARKERS[number % 8], markersize=3.5, markevery=3,
                linewidth=1.2, label=label,
            )  # fmt: skip
        panel.set_xlabel("optimizer steps")
    axes[0].set_title("against base")
    axes[1].set_title("less its value at step 0")
    axes[0].set_ylabel(f"{_MEASURES[measure]}, mean of matrices")
    legend_below(figure, axes[0], 4)
    return figure


def _loss(pyplot: Any, runs: dict[str, Any]) -> Any:
    figure, axes = pyplot.subplots(1, 1, figsize=(6.2, 3.2))
    names = [name for name in runs if name != "base"]  # as many colours as in the other figures
    for number, name in [*enumerate(names), (6, "base")]:
        history = runs[name]["history"]
        points = [
            (step, loss)
            for step, loss in zip(history["steps"], history["loss"], strict=True)
            if loss is not None and step > 0
        ]
        axes.plot(
            [step for step, _ in points], [loss for _, loss in points],
            color=COLOURS[number % 8], linewidth=1.2, label=_LABELS.get(name, name),
            linestyle="--" if name == "base" else "-",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss, mean since the last point")
    axes.legend(ncols=2)
    return figure


def _live(pyplot: Any, points: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(8.2, 3.0), sharey=True)
    for panel, when in zip(axes, ("before", "after"), strict=True):
        here = [point for point in points if point["when"] == when]
        for number, (kind, label) in enumerate(
            (("baseline_max", "baseline"), ("flash_max", "flash, preset paper"))
        ):
            xs = [place + 0.36 * (number - 0.5) for place in range(len(here))]
            panel.bar(xs, [p[kind] for p in here], 0.35, color=COLOURS[number], label=label)
        panel.set_xticks(range(len(here)), [point["layer"] for point in here])
        panel.set_title(f"{when} training")
        panel.grid(axis="x", visible=False)
    axes[0].set_ylabel("max |output - FP64|, BF16, mean of heads")
    axes[0].legend()
    return figure
