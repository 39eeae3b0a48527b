"""The figures of the training study: medians over seeds, bands from the least to the largest."""

from __future__ import annotations

from typing import Any

from ..training.training_study import by_seed, probe_changes
from .names import attention_name
from .plots import Draw, Line, dot_panels, line_panels

_LABELS = {
    "repeat": "repeat (control)",
    "nudge": "one weight, one gap",
    "paper": "preset paper",
    "kernel": "preset kernel",
    "kernel+residual": "kernel, O's residual",
    "init": "other initial weights",
    "fp32": "FP32 for BF16",
    "fp16": "FP16 for FP32",
    "pure_bf16": "BF16 weights too",
    "data": "other data (control)",
}
Series = list[tuple[float, list[float | None]]]


def training_plots(value: dict[str, Any]) -> dict[str, Draw]:
    """Returns what draws each figure, by file name."""
    drawers: dict[str, Draw] = {
        "fig7": lambda pyplot: _over_steps(pyplot, value, ("max_difference", "l2")),
        "fig8": lambda pyplot: _over_steps(pyplot, value, ("wasserstein", "function")),
        "training-loss": lambda pyplot: _loss(pyplot, value),
    }
    if len(_noise(value)) > 1:
        drawers["noise"] = lambda pyplot: _noise_sizes(pyplot, value)
    return drawers


def _label(name: str) -> str:
    return _LABELS.get(name, attention_name(name))


def _series(value: dict[str, Any], name: str, measure: str) -> Series:
    """A measure less its value at step 0, at each step, of all seeds."""
    histories = list(by_seed(value, name).values())
    if not histories or measure not in histories[0]:
        return []
    points: Series = []
    for place, step in enumerate(histories[0]["steps"]):
        if step:
            found = [(h[measure][place], h[measure][0]) for h in histories]
            points.append((step, [None if a is None or b is None else a - b for a, b in found]))
    return points


_MEASURES = {
    "max_difference": "max |difference|, mean of matrices",
    "l2": "‖w - w'‖ / ‖w'‖",
    "wasserstein": "Wasserstein distance, mean of matrices",
    "function": "difference of outputs / their spread",
}


def _over_steps(pyplot: Any, value: dict[str, Any], measures: tuple[str, ...]) -> Any:
    names = [
        name
        for name, run in value["runs"].items()
        if run["against"] and not name.startswith("explicit:")
    ]
    columns = {
        _MEASURES[measure]: [
            Line(_label(name), _series(value, name, measure), number)
            for number, name in enumerate(names)
        ]
        for measure in measures
    }
    return line_panels(pyplot, columns, ("optimizer steps", "distance"), sharey=False)


def _loss(pyplot: Any, value: dict[str, Any]) -> Any:
    """Each run's loss less that of the run it is compared with, on held-out batches."""
    names = [name for name in value["runs"] if value["runs"][name]["against"]]
    values = {_label(name): probe_changes(value, name) for name in names}
    shown = {"median and range over seeds": [("held-out loss", values)]}
    label = "at the end, less the other run's"
    figure = dot_panels(pyplot, shown, list(values), label, "linear")
    figure.axes[0].set_xscale("symlog", linthresh=1e-4)
    ticks = (-0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1)
    figure.axes[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    figure.axes[0].minorticks_off()
    return figure


def _noise(value: dict[str, Any]) -> list[tuple[int, str]]:
    found = [name for name in value["runs"] if name.startswith("explicit:p")]
    return sorted((int(name.rpartition("p")[2]), name) for name in found if by_seed(value, name))


def _noise_sizes(pyplot: Any, value: dict[str, Any]) -> Any:
    names = _noise(value)
    steps = next(iter(by_seed(value, names[0][1]).values()))["steps"]
    chosen = [step for step in (steps[1], steps[len(steps) // 2], steps[-1]) if step]

    def at(step: int, measure: str) -> Series:
        return [(bits, dict(_series(value, name, measure))[step]) for bits, name in names]

    columns = {
        _MEASURES[measure]: [
            Line(f"step {step}", at(step, measure), number) for number, step in enumerate(chosen)
        ]
        for measure in ("l2", "function")
    }
    labels = ("bits of scores, weights and their gradients", "distance from base")
    return line_panels(pyplot, columns, labels, [bits for bits, _ in names])
