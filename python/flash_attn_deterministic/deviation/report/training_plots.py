"""The figures of the training study: medians over seeds, bands from the least to the largest."""

from __future__ import annotations

from typing import Any

from ..training.training_study import by_seed, probe_changes
from .names import attention_name
from .plots import DotPanels, Line, LinePanels, Panels

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


def training_plots(value: dict[str, Any]) -> dict[str, Panels]:
    """Returns each figure, by file name."""
    noise = [n for n in value["runs"] if n.startswith("explicit:p") and by_seed(value, n)]
    figures: dict[str, Panels] = {
        "fig7": _over_steps(value, ("max_difference", "l2")),
        "fig8": _over_steps(value, ("wasserstein", "function")),
        "training-loss": _loss(value),
    }
    if len(noise) > 1:
        figures["noise"] = _noise_sizes(value, noise)
    return figures


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


def _over_steps(value: dict[str, Any], measures: tuple[str, ...]) -> LinePanels:
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
    return LinePanels(columns, ("optimizer steps", "distance"), sharey=False)


def _loss(value: dict[str, Any]) -> DotPanels:
    """Each run's loss less that of the run it is compared with, on held-out batches."""
    names = [name for name in value["runs"] if value["runs"][name]["against"]]
    values = {_label(name): probe_changes(value, name) for name in names}
    shown = {"median and range over seeds": [("held-out loss", values)]}
    return DotPanels(shown, list(values), "at the end, less the other run's", "symlog")


def _noise_sizes(value: dict[str, Any], names: list[str]) -> LinePanels:
    """The runs of explicit attention in some bits, at a few steps."""
    sizes = sorted((int(name.rpartition("p")[2]), name) for name in names)
    steps = next(iter(by_seed(value, names[0]).values()))["steps"]
    chosen = [step for step in (steps[1], steps[len(steps) // 2], steps[-1]) if step]
    columns = {
        _MEASURES[measure]: [
            Line(f"step {step}", [
                (bits, dict(_series(value, name, measure))[step]) for bits, name in sizes
            ], number)
            for number, step in enumerate(chosen)
        ]
        for measure in ("l2", "function")
    }  # fmt: skip
    labels = ("bits of scores, weights and their gradients", "distance from base")
    return LinePanels(columns, labels, [bits for bits, _ in sizes])
