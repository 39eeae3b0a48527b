"""The figures of `deviation gradients`."""

from __future__ import annotations

from typing import Any

from .names import attention_name
from .plots import DotPanels

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
                (attention_name(name), {row: value["layers"][row][name][measure] for row in rows})
                for name in value["whole"]
            ]
            for measure in measures
        }

    calls = [
        (attention_name(name), {row: found[name] for row, found in value["forward"].items()
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
