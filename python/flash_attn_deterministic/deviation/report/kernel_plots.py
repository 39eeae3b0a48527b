"""The figures of the study of real kernels."""

from __future__ import annotations

from typing import Any

from .forward_plots import title
from .plots import COLOURS, Draw, legend_below, lengths_axis, line, median

_NAMES = {
    "ours": "this wheel",
    "ours_nondeterministic": "this wheel, deterministic off",
    "torch_flash": "torch flash",
    "torch_cudnn": "torch cuDNN",
    "torch_efficient": "torch efficient",
    "torch_math": "torch math",
    "baseline": "explicit in the format",
}
_ORDER = tuple(_NAMES)


def kernel_plots(value: dict[str, Any]) -> dict[str, Draw]:
    """Returns what draws each figure that the study's results allow, by file name."""
    drawers: dict[str, Draw] = {}
    if value["forward"]:
        drawers["kernels-forward"] = lambda pyplot: _forward(pyplot, value["forward"])
    if value["backward"]:
        drawers["kernels-backward"] = lambda pyplot: _backward(pyplot, value["backward"])
    if any(point["output"] == "dq" for point in value["run_to_run"]):
        drawers["kernels-run-to-run"] = lambda pyplot: _floor(pyplot, value["run_to_run"])
    return drawers


def backend_name(backend: str) -> str:
    return _NAMES.get(backend, backend)


def _backends(points: list[dict[str, Any]]) -> list[str]:
    return [name for name in _ORDER if any(point["backend"] == name for point in points)]


def _forward(pyplot: Any, points: list[dict[str, Any]]) -> Any:
    head_dim = min(point["head_dim"] for point in points)
    shown = [p for p in points if p["format"] == "bf16" and p["head_dim"] == head_dim]
    names = [n for n in ("uniform", "normal") if any(p["inputs"] == n for p in shown)]
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4.1 * len(names), 3.3), sharey=True, squeeze=False
    )
    for inputs, panel in zip(names, axes[0], strict=True):
        panel.set_yscale("log")
        panel.set_title(f"inputs: {title(inputs)}")
        for backend in _backends(shown):
            if backend == "ours_nondeterministic":
                continue
            here = [p for p in shown if (p["inputs"], p["backend"]) == (inputs, backend)]
            line(panel, [(p["seqlen"], p["result"]["max"]) for p in here],
                 _ORDER.index(backend), backend_name(backend),
                 "--" if backend == "baseline" else "-", backend == "baseline")  # fmt: skip
        lengths_axis(panel, [p["seqlen"] for p in shown], "sequence length")
    axes[0][0].set_ylabel(f"max |output - FP64|, BF16, d = {head_dim}")
    legend_below(figure, axes[0][0], 3)
    return figure


def _backward(pyplot: Any, points: list[dict[str, Any]]) -> Any:
    head_dim = min(point["head_dim"] for point in points)
    seqlen = max(point["seqlen"] for point in points)
    shown = [
        p for p in points
        if (p["format"], p["head_dim"], p["seqlen"]) == ("bf16", head_dim, seqlen)
    ]  # fmt: skip
    names = [n for n in ("uniform", "normal") if any(p["inputs"] == n for p in shown)]
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.1 * len(names), 3.3), squeeze=False)
    backends = _backends(shown)
    for inputs, panel in zip(names, axes[0], strict=True):
        panel.set_yscale("log")
        panel.set_title(f"inputs: {title(inputs)}, length {seqlen}")
        for number, backend in enumerate(backends):
            values = [
                median(next(p["result"]["relative"] for p in shown if
                            (p["inputs"], p["backend"], p["gradient"]) == (inputs, backend, name)))
                for name in ("dq", "dk", "dv")
            ]  # fmt: skip
            width = 0.8 / len(backends)
            xs = [place + width * (number - (len(backends) - 1) / 2) for place in range(3)]
            panel.bar(xs, values, width, color=COLOURS[_ORDER.index(backend) % 8],
                      label=backend_name(backend))  # fmt: skip
        panel.set_xticks(range(3), ["dq", "dk", "dv"])
        panel.grid(axis="x", visible=False)
    axes[0][0].set_ylabel(f"‖deviation‖ / ‖gradient‖, BF16, d = {head_dim}")
    legend_below(figure, axes[0][0], 3)
    return figure


def _floor(pyplot: Any, points: list[dict[str, Any]]) -> Any:
    shown = [p for p in points if p["output"] in ("dq", "dk", "dv")]
    seqlen = max(p["seqlen"] for p in shown)
    shown = [p for p in shown if p["seqlen"] == seqlen]
    backends = _backends(shown)
    figure, axes = pyplot.subplots(1, 1, figsize=(6.4, 0.8 + 0.42 * len(backends)))
    top = max(p["relative"] for p in shown) or 1.0
    for number, name in enumerate(("dq", "dk", "dv")):
        for place, backend in enumerate(backends):
            value = next(
                p["relative"] for p in shown if (p["backend"], p["output"]) == (backend, name)
            )
            y = place + 0.26 * (number - 1)
            axes.barh(y, value, 0.25, color=COLOURS[number], label=name if place == 0 else None)
            if value == 0:
                axes.text(top * 0.01, y, f"{name}: 0", va="center", fontsize=6.5)
    axes.set_yticks(range(len(backends)), [backend_name(backend) for backend in backends])
    axes.invert_yaxis()
    axes.set_xlim(0, top * 1.05)
    axes.set_xlabel(f"max |repeat - first| / max |gradient|, BF16, length {seqlen}")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    return figure
