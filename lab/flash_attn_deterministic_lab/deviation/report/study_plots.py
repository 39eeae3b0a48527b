"""The figures of the studies of real kernels, of a model's gradients, and of trainings."""

from __future__ import annotations

from typing import Any

from ...pictures import DotPanels, Line, LinePanels, Panels
from ..kernels.kernel_study import COMPARED
from ..training.training_study import by_seed, minus
from .names import title

MEASURES = {
    "error": "‖error‖ / ‖gradient‖",
    "noise": "‖error‖ / spread between batches",
    "systematic": "share of error² common to batches",
}


def gradient_plots(value: dict[str, Any]) -> dict[str, DotPanels]:
    """Returns each figure, by file name."""
    every = list(value["layers"])
    rows = [name for name in every if name.endswith("weight") or "." not in name] or every

    def layers(*measures: str) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        return {
            MEASURES[measure]: [
                (title(name), {row: value["layers"][row][name][measure] for row in rows})
                for name in value["whole"]
            ]
            for measure in measures
        }

    calls = [
        (title(name), {row: found[name] for row, found in value["forward"].items()
                                if name in found})
        for name in value["whole"]
    ]  # fmt: skip
    return {
        "gradients": DotPanels(layers("error", "noise"), rows, "relative size"),
        "systematic": DotPanels(layers("systematic"), rows, "share", "linear"),
        "outputs": DotPanels(
            {"outputs": calls}, list(value["forward"]), "‖output - exact‖ / ‖exact‖"
        ),
    }


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
    return {
        "fig7": _over_steps(value, ("max_difference", "l2")),
        "fig8": _over_steps(value, ("wasserstein", "function")),
    }


def _label(name: str) -> str:
    return _LABELS.get(name, title(name))


def _series(value: dict[str, Any], name: str, measure: str) -> Series:
    """A measure less its value at step 0, at each step, of all seeds."""
    histories = list(by_seed(value, name).values())
    if not histories or measure not in histories[0]:
        return []
    points: Series = []
    for place, step in enumerate(histories[0]["steps"]):
        if step:
            points.append((step, [minus(h[measure][place], h[measure][0]) for h in histories]))
    return points


_DISTANCES = {
    "max_difference": "max |difference|, mean of matrices",
    "l2": "‖w - w'‖ / ‖w'‖",
    "wasserstein": "Wasserstein distance, mean of matrices",
    "function": "difference of outputs / their spread",
}


def _over_steps(value: dict[str, Any], measures: tuple[str, ...]) -> LinePanels:
    runs = value["runs"].items()
    names = [n for n, run in runs if run["against"] and not n.startswith("explicit:")]
    columns = {
        _DISTANCES[measure]: [
            Line(_label(name), _series(value, name, measure), number)
            for number, name in enumerate(names)
        ]
        for measure in measures
    }
    return LinePanels(columns, ("optimizer steps", "distance"), sharey=False)
