"""The figures of the studies of real kernels, of a model's gradients, and of trainings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...pictures import DotPanels, Line, LinePanels, Panels
from ..kernels.kernel_study import COMPARED
from ..training.training_study import FP16, NUDGES, by_seed, probe_changes
from .judging import LANGUAGE, MODEL, study_of
from .names import title

MEASURES = {
    "error": "‖error‖ / ‖gradient‖",
    "noise": "‖error‖ / spread between batches",
    "systematic": "share of error² common to batches",
}


def gradient_plots(value: dict[str, Any]) -> dict[str, DotPanels]:
    """Returns each figure, by file name; a row has the same tensor of all blocks."""
    every = list(value["layers"])
    weights = [name for name in every if name.endswith("weight") or "." not in name] or every

    def layers(*measures: str) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        return {
            MEASURES[measure]: [
                (title(name), _by_kind({w: value["layers"][w][name][measure] for w in weights}))
                for name in value["whole"]
            ]
            for measure in measures
        }

    calls = {
        name: {row: found[name] for row, found in value["forward"].items() if name in found}
        for name in value["whole"]
    }
    rows = list(_by_kind({name: [] for name in weights}))
    found = {
        "gradients": DotPanels(layers("error", "noise"), rows, "relative size"),
        "systematic": DotPanels(layers("systematic"), rows, "share", "linear"),
        "outputs": DotPanels(
            {"outputs": [(title(name), found) for name, found in calls.items()]},
            list(value["forward"]), "‖output - exact‖ / ‖exact‖",
        ),
    }  # fmt: skip
    prefix = "model-" if study_of(value) == MODEL else ""
    return {prefix + name: panels for name, panels in found.items()}


def _by_kind(found: dict[str, Any]) -> dict[str, list[float | None]]:
    """Joins the intervals of tensors whose names differ in a number alone."""
    kinds: dict[str, list[float | None]] = {}
    for name, numbers in found.items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).extend(numbers)
    return kinds


def kernel_plots(value: dict[str, Any]) -> dict[str, Panels]:
    """Returns each figure that the study's results allow, by file name."""
    figures: dict[str, Panels] = {}
    if value["forward"]:
        figures["kernels-forward"] = _kernel_outputs(value["forward"])
    if value["backward"]:
        figures["kernels-backward"] = _kernel_gradients(value["backward"])
    return figures


def _backends(points: list[dict[str, Any]]) -> list[str]:
    return [name for name in COMPARED if any(point["backend"] == name for point in points)]


def _kernel_outputs(points: list[dict[str, Any]]) -> LinePanels:
    head_dim = min(point["head_dim"] for point in points)
    shown = [p for p in points if p["format"] == "bf16" and p["head_dim"] == head_dim]
    inputs = [n for n in ("uniform", "normal") if any(p["inputs"] == n for p in shown)]
    columns = {
        f"inputs: {title(name)}": [
            Line(title(backend), [
                (p["seqlen"], p["result"]["max"])
                for p in shown
                if (p["inputs"], p["backend"]) == (name, backend)
            ], number, "--" if backend == "explicit" else "-")
            for number, backend in enumerate(_backends(shown))
            if backend not in ("ours-atomics", "ours+residual")  # the same forward
        ]
        for name in inputs
    }  # fmt: skip
    labels = ("sequence length", f"max |output - FP64|, BF16, d = {head_dim}")
    return LinePanels(columns, labels, [p["seqlen"] for p in shown])


def _kernel_gradients(points: list[dict[str, Any]]) -> DotPanels:
    head_dim = min(point["head_dim"] for point in points)
    seqlen = max(point["seqlen"] for point in points)
    shown = [p for p in points if (p["head_dim"], p["seqlen"]) == (head_dim, seqlen)]
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for p in shown:
        row = f"{title(p['inputs'])}, {p['format'].upper()}"
        values.setdefault((p["gradient"], p["backend"]), {})[row] = p["result"]["relative"]
    rows = list(dict.fromkeys(row for found in values.values() for row in found))
    columns = {
        f"{gradient}, length {seqlen}": [
            (title(name), values.get((gradient, name), {})) for name in _backends(shown)
        ]
        for gradient in ("dq", "dk", "dv")
    }
    return DotPanels(columns, rows, f"‖deviation‖ / ‖gradient‖, d = {head_dim}")


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


def training_plots(value: dict[str, Any]) -> dict[str, Panels]:
    """Returns each figure, by file name."""
    prefix = "language-" if study_of(value) == LANGUAGE else ""
    runs = {name: run for name, run in value["runs"].items() if by_seed(value, name)}
    sixteen = [name for name in runs if name.startswith("fp16")]
    others = [name for name, run in runs.items()
              if run["against"] and name != "repeat" and name not in sixteen]  # fmt: skip
    attentions = [n for n in runs if runs[n]["against"] == "base" and (runs[n]["attention"])]
    changes = {_label(name): probe_changes(value, name) for name in (*NUDGES, *attentions)
               if name in runs}  # fmt: skip
    shown = {"changes of the loss": [("median, and from the least to the largest seed", changes)]}
    found: dict[str, Panels] = {
        "fig7": _over_steps(value, others, ("max_difference", "wasserstein", "l2")),
        "loss": DotPanels(shown, list(changes), "held-out loss over base's, less 1", "linear"),
    }
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
    labels_of_axes = ("optimizer steps", "distance")
    return LinePanels(columns, labels_of_axes, sharey=False, decades=6)
