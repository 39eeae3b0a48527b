"""How distributions, attentions and points of a figure are named and grouped."""

from __future__ import annotations

from ..attentions.registry import LABELS
from ..emulate.steps import PRESETS
from ..forward.inputs import DISTRIBUTIONS
from ..forward.plan import Points

_TITLES = {
    **LABELS,
    "uniform": "uniform [0, 1)",
    "normal": "normal (0, 1)",
    "normal_mean": "normal (1, 1)",
    "scaled_logits": "normal, 4 q",
    "outliers": "normal, outliers",
}


def title(name: str) -> str:
    """Returns what a distribution or an attention is called."""
    return _TITLES.get(name, name)


def inputs_of(points: Points) -> list[str]:
    """Returns the distributions of a figure's cells, in a fixed order."""
    return [name for name in DISTRIBUTIONS if any(cell.inputs == name for cell, _ in points)]


def presets_of(points: Points) -> list[str]:
    """Returns the presets of a figure's cells, in a fixed order."""
    return [name for name in PRESETS if any(cell.preset == name for cell, _ in points)]


def select(points: Points, **wanted: object) -> Points:
    """Returns the points whose cells have these values."""
    return [
        (cell, result)
        for cell, result in points
        if all(getattr(cell, name) == value for name, value in wanted.items())
    ]
