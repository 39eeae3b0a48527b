"""The page of `deviation gradients`: plots and one table."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from ..instrument.gradients import RESULT_FILE, read_gradients
from ..numbers.intervals import Interval
from ..study.files import write_text
from .names import attention_name
from .page import embedded, page_of, table_of
from .plots import Draw, dots, draw_all, legend_below

_MEASURES = {
    "error": "‖error‖ / ‖gradient‖",
    "noise": "‖error‖ / spread between batches",
    "systematic": "share of error² common to batches",
}


def write_gradients_page(folder: Path) -> Path:
    """Draws gradients.json of a folder into its gradients.html, which needs no other file.

    Raises:
        ArgumentError: the folder holds no such result.
    """
    value = read_gradients(folder / RESULT_FILE)
    drawers: dict[str, Draw] = {
        "gradients": lambda pyplot: _layers(pyplot, value),
        "outputs": lambda pyplot: _outputs(pyplot, value),
    }
    plots = draw_all(drawers, folder / "plots")
    setup = value["configuration"]
    intro = (
        f"{setup['model']}, {value['parameters'] / 1e6:.3g} million parameters, "
        f"{setup['precision']}, {value.get('done', setup['batches'])} batches on {setup['device']}, "
        f"{value['seconds']:.0f} s, {value['memory_bytes'] / 1e6:.0f} MB of kept gradients. Each "
        "attention against exact (FP64) attention in the same model; numbers with 95 % bootstrap "
        "intervals over batches. error: relative size of the gradient's error. noise: that error "
        "over the spread of the gradient from batch to batch. systematic: share of the squared "
        "error that batches have in common, which adds up over steps; near 0, errors average out."
    )
    rows = [
        [attention_name(name), *(str(Interval(*found[measure])) for measure in _MEASURES)]
        for name, found in value["whole"].items()
    ]
    rows += [
        [attention_name(name), f"not run: {reason}", "", ""]
        for name, reason in value["missing"].items()
    ]
    body = [
        f"<p>{html.escape(intro)}</p>",
        "<h2>Whole model</h2>",
        table_of(["attention", *_MEASURES], rows),
        "<h2>By parameter: gradients</h2>",
        embedded("gradients of each parameter tensor, forward and backward together", plots[0]),
        "<h2>By call: outputs of attention on the same tensors</h2>",
        embedded("relative error of the output of each call, mean over batches", plots[1]),
    ]
    path = folder / "gradients.html"
    write_text(path, page_of("Rounding of attention, in this model's gradients", body))
    return path


def _layers(pyplot: Any, value: dict[str, Any]) -> Any:
    rows = [name for name in value["layers"] if name.endswith("weight") or "." not in name]
    figure, row = pyplot.subplots(
        1, len(_MEASURES), figsize=(12, 1.4 + 0.24 * len(rows)), sharey=True
    )
    names = list(value["whole"])
    for measure, panel in zip(_MEASURES, row, strict=True):
        panel.set_title(_MEASURES[measure])
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
