"""The figures of the study of real kernels."""

from __future__ import annotations

from typing import Any

from ..kernels.plan import COMPARED
from .names import attention_name, title
from .plots import DotPanels, Line, LinePanels, Panels


def kernel_plots(value: dict[str, Any]) -> dict[str, Panels]:
    """Returns each figure that the study's results allow, by file name."""
    figures: dict[str, Panels] = {}
    if value["forward"]:
        figures["kernels-forward"] = _forward(value["forward"])
    if value["backward"]:
        figures["kernels-backward"] = _backward(value["backward"])
    return figures


def _names(points: list[dict[str, Any]]) -> list[str]:
    return [name for name in COMPARED if any(point["backend"] == name for point in points)]


def _forward(points: list[dict[str, Any]]) -> LinePanels:
    head_dim = min(point["head_dim"] for point in points)
    shown = [p for p in points if p["format"] == "bf16" and p["head_dim"] == head_dim]
    inputs = [n for n in ("uniform", "normal") if any(p["inputs"] == n for p in shown)]
    columns = {
        f"inputs: {title(name)}": [
            Line(attention_name(backend), [
                (p["seqlen"], p["result"]["max"])
                for p in shown
                if (p["inputs"], p["backend"]) == (name, backend)
            ], number, "--" if backend == "explicit" else "-")
            for number, backend in enumerate(_names(shown))
            if backend not in ("ours-atomics", "ours+residual")  # the same forward
        ]
        for name in inputs
    }  # fmt: skip
    labels = ("sequence length", f"max |output - FP64|, BF16, d = {head_dim}")
    return LinePanels(columns, labels, [p["seqlen"] for p in shown])


def _backward(points: list[dict[str, Any]]) -> DotPanels:
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
            (attention_name(name), values.get((gradient, name), {})) for name in _names(shown)
        ]
        for gradient in ("dq", "dk", "dv")
    }
    return DotPanels(columns, rows, f"‖deviation‖ / ‖gradient‖, d = {head_dim}")
