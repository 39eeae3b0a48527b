"""The figures of `deviation gradients`."""

from __future__ import annotations

from typing import Any

from .names import attention_name
from .plots import Draw, dot_panels

MEASURES = {
    "error": "‖error‖ / ‖gradient‖",
    "noise": "‖error‖ / spread between batches",
    "systematic": "share of error² common to batches",
}


def gradient_plots(value: dict[str, Any]) -> dict[str, Draw]:
    """Returns what draws each figure, by file name."""
    rows = [name for name in value["layers"] if name.endswith("weight") or "." not in name]

    def layers(measure: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            (attention_name(name), {row: value["layers"][row][name][measure] for row in rows})
            for name in value["whole"]
        ]

    calls = [
        (attention_name(name), {row: found[name] for row, found in value["forward"].items()
                                if name in found})
        for name in value["whole"]
    ]  # fmt: skip
    sizes = {MEASURES[measure]: layers(measure) for measure in ("error", "noise")}
    shares = {MEASURES["systematic"]: layers("systematic")}
    return {
        "gradients": lambda pyplot: dot_panels(pyplot, sizes, rows, "relative size"),
        "systematic": lambda pyplot: dot_panels(pyplot, shares, rows, "share", "linear"),
        "outputs": lambda pyplot: dot_panels(
            pyplot, {"outputs": calls}, list(value["forward"]), "‖output - exact‖ / ‖exact‖"
        ),
    }
