"""The figures of `deviation gradients`."""

from __future__ import annotations

from typing import Any

from .names import attention_name
from .plots import Draw, dots, legend_below

MEASURES = {
    "error": "‖error‖ / ‖gradient‖",
    "noise": "‖error‖ / spread between batches",
    "systematic": "share of error² common to batches",
}


def gradient_plots(value: dict[str, Any]) -> dict[str, Draw]:
    """Returns what draws each figure, by file name."""
    return {
        "gradients": lambda pyplot: _layers(pyplot, value),
        "outputs": lambda pyplot: _outputs(pyplot, value),
    }


def _layers(pyplot: Any, value: dict[str, Any]) -> Any:
    rows = [name for name in value["layers"] if name.endswith("weight") or "." not in name]
    figure, row = pyplot.subplots(
        1, len(MEASURES), figsize=(12, 1.4 + 0.24 * len(rows)), sharey=True
    )
    names = list(value["whole"])
    for measure, panel in zip(MEASURES, row, strict=True):
        panel.set_title(MEASURES[measure])
        panel.set_xscale("linear" if measure == "systematic" else "log")
        for number, name in enumerate(names):
            found = {layer: value["layers"][layer][name][measure] for layer in rows}
            dots(panel, rows, found, number, attention_name(name),
                 0.7 * ((number + 0.5) / len(names) - 0.5), number >= 8)  # fmt: skip
        if measure == "systematic":
            panel.axvline(0, color="#333333", linewidth=0.8)
    row[0].tick_params(axis="y", labelsize=7)
    legend_below(figure, row[0], 4)
    return figure


def _outputs(pyplot: Any, value: dict[str, Any]) -> Any:
    rows = list(value["forward"])
    figure, axes = pyplot.subplots(1, 1, figsize=(7, 1.4 + 0.3 * len(rows)))
    axes.set_xscale("log")
    names = list(value["whole"])
    for number, name in enumerate(names):
        found = {row: value["forward"][row][name] for row in rows if name in value["forward"][row]}
        dots(axes, rows, found, number, attention_name(name),
             0.7 * ((number + 0.5) / len(names) - 0.5), number >= 8)  # fmt: skip
    axes.set_xlabel("‖output - exact‖ / ‖exact‖")
    axes.tick_params(axis="y", labelsize=7)
    legend_below(figure, axes, 4)
    return figure
