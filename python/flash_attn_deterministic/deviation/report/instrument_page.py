"""The page of `deviation gradients`: plots and one table."""

from __future__ import annotations

import html
from pathlib import Path

from ..instrument.gradients import RESULT_FILE, read_gradients
from ..numbers.intervals import Interval
from ..study.files import write_text
from .gradient_plots import MEASURES, gradient_plots
from .names import attention_name
from .page import embedded, page_of, table_of
from .plots import draw_all


def write_gradients_page(folder: Path) -> Path:
    """Draws gradients.json of a folder into its gradients.html, which needs no other file.

    Raises:
        ArgumentError: the folder holds no such result.
    """
    value = read_gradients(folder / RESULT_FILE)
    plots = draw_all(gradient_plots(value), folder / "plots")
    setup = value["configuration"]
    intro = (
        f"{setup['model']}, {value['parameters'] / 1e6:.3g} million parameters, "
        f"{setup['precision']}, {value.get('done', setup['batches'])} batches on "
        f"{setup['device']}, "
        f"{value['seconds']:.0f} s, {value['memory_bytes'] / 1e6:.0f} MB of kept gradients. Each "
        "attention against exact (FP64) attention in the same model; numbers with 95 % bootstrap "
        "intervals over batches. error: relative size of the gradient's error. noise: that error "
        "over the spread of the gradient from batch to batch. systematic: share of the squared "
        "error that batches have in common, which adds up over steps; near 0, errors average out."
    )
    rows = [
        [attention_name(name), *(str(Interval(*found[measure])) for measure in MEASURES)]
        for name, found in value["whole"].items()
    ]
    rows += [
        [attention_name(name), f"not run: {reason}", "", ""]
        for name, reason in value["missing"].items()
    ]
    body = [
        f"<p>{html.escape(intro)}</p>",
        "<h2>Whole model</h2>",
        table_of(["attention", *MEASURES], rows),
        "<h2>By parameter: gradients</h2>",
        embedded("gradients of each parameter tensor, forward and backward together", plots[0]),
        "<h2>By call: outputs of attention on the same tensors</h2>",
        embedded("relative error of the output of each call, mean over batches", plots[1]),
    ]
    path = folder / "gradients.html"
    write_text(path, page_of("Rounding of attention, in this model's gradients", body))
    return path
