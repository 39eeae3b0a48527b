"""Which cells each figure of the study of emulated attention is made of."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..emulate.steps import PRESETS, STEP_NAMES, TILING
from ..study.environment import Progress, one_thread
from ..study.files import new_result, write_result
from .cells import Cell, Result, run_cell
from .inputs import DISTRIBUTIONS

SIXTEEN_BITS = ("bf16", "fp16")  # formats of kernels
FOUR_FORMATS = (*SIXTEEN_BITS, "fp32", "fp64")
_PRESETS = ("paper", "kernel", "tree")  # the first: of figures of one preset
_TWO = ("uniform", "normal")  # distributions, of figures that don't show all
_HEAD_DIM = Cell.head_dim
Point = tuple[Cell, Result]
Points = list[Point]


@dataclass(frozen=True)
class Plan:
    """What a run of the study covers."""

    seeds: int = 8  # draws per point
    quick: bool = False  # fewer lengths, formats and distributions: less than a minute

    @property
    def inputs(self) -> tuple[str, ...]:
        return _TWO if self.quick else tuple(DISTRIBUTIONS)

    @property
    def seqlens(self) -> tuple[int, ...]:
        """The lengths of figure 5."""
        return (64, 128, 256, 512) if self.quick else (128, 256, 512, 1024, 2048, 4096)

    @property
    def seqlen(self) -> int:
        """The length of the figures that don't sweep it."""
        return self.seqlens[-3]

    def base(self) -> Cell:
        return Cell(_PRESETS[0], seqlen=self.seqlen, seeds=self.seeds)


# --- Figures -----------------------------------------------------------------------------------


def _grid(base: Cell, **fields: Iterable[Any]) -> list[Cell]:
    """Returns a cell for every combination of these values of fields."""
    return [
        replace(base, **dict(zip(fields, values, strict=True)))
        for values in itertools.product(*fields.values())
    ]


def _formats(plan: Plan) -> list[Cell]:
    return _grid(plan.base(), preset=_PRESETS, format=FOUR_FORMATS, inputs=_TWO)


def _golden(plan: Plan) -> list[Cell]:
    return _grid(plan.base(), preset=PRESETS, format=SIXTEEN_BITS, inputs=plan.inputs)


def _lengths(plan: Plan) -> list[Cell]:
    first, *others = _PRESETS
    return [
        *_grid(plan.base(), preset=[first], inputs=plan.inputs, seqlen=plan.seqlens),
        *_grid(plan.base(), preset=others, inputs=_TWO, seqlen=plan.seqlens),
    ]


def _blocks(plan: Plan, keys: Iterable[int], formats: Sequence[str] = SIXTEEN_BITS) -> list[Cell]:
    """What figure 6 has of each format and distribution, at these sizes of blocks."""
    formats = formats[:1] if plan.quick else formats
    return _grid(plan.base(), format=formats, inputs=_TWO, block_c=list(keys))


def _swapped(plan: Plan) -> list[Cell]:
    """Tiles of B_c = M/4d keys and B_r = min(M/4d, d) rows, each before the same with both swapped.

    Rows of a tile do not touch each other: keys are all that the arithmetic sees.
    """
    sizes = (2, 8) if plan.quick else (2, 4, 8)
    keys = [factor * _HEAD_DIM for factor in sizes if factor * _HEAD_DIM <= plan.seqlen]
    return _blocks(plan, (n for size in keys for n in (size, _HEAD_DIM)))


def _square(plan: Plan) -> list[Cell]:
    """Square tiles, each before one of the same area with four times as many keys as rows."""
    sides = (16, 64) if plan.quick else (8, 16, 32, 64, 128, 256)
    return _blocks(plan, (n for side in sides if 2 * side <= plan.seqlen for n in (side, 2 * side)))


def _larger(plan: Plan) -> list[Cell]:
    sizes = (16, 64, 256) if plan.quick else (8, 16, 32, 64, 128, 256, 512)
    return _blocks(plan, (size for size in sizes if size <= plan.seqlen), FOUR_FORMATS)


def _ablation(plan: Plan) -> list[Cell]:
    """Each step alone, all that tiling adds alone, and all but what a claim names."""
    cells = []
    for cell in _grid(plan.base(), inputs=_TWO):
        cells += [cell, *(replace(cell, only=steps) for steps in (*STEP_NAMES, TILING))]
        cells += [replace(cell, exempt=steps) for steps in ("rescale", TILING)]
    return cells


def _backward(plan: Plan) -> list[Cell]:
    base = replace(plan.base(), preset="kernel", kind="gradients")
    return _grid(base, format=SIXTEEN_BITS, inputs=plan.inputs)


FIGURES: dict[str, Callable[[Plan], list[Cell]]] = {
    "3": _formats,
    "4": _golden,
    "5": _lengths,
    "6a": _swapped,
    "6b": _square,
    "6c": _larger,
    "ablation": _ablation,
    "backward": _backward,
}


def run_forward(plan: Plan, folder: Path) -> dict[str, Any]:
    """Runs the study and writes its forward.json.

    Returns:
        Its content: {"figures": {name: [index of a cell]}, "cells": [{"cell", "result"}], ...}.

    Raises:
        ArgumentError: there are no draws.
    """
    if plan.seeds < 1:
        raise ArgumentError(f"seeds: expected at least 1, got {plan.seeds}")
    figures = {name: cells(plan) for name, cells in FIGURES.items()}
    unique = list(dict.fromkeys(cell for cells in figures.values() for cell in cells))
    place = {cell: index for index, cell in enumerate(unique)}
    found = []
    start, progress = time.monotonic(), Progress("forward", len(unique))
    with one_thread():
        for cell in unique:
            found.append({"cell": asdict(cell), "result": run_cell(cell)})
            progress.advance(f"{cell.preset} {cell.format} {cell.inputs} {cell.seqlen}")
    value = {
        **new_result("forward", asdict(plan)),
        "seconds": time.monotonic() - start,
        "figures": {name: [place[cell] for cell in cells] for name, cells in figures.items()},
        "cells": found,
    }
    write_result(folder, value)
    return value


def forward_points(value: dict[str, Any]) -> dict[str, Points]:
    """Returns the cells and results of each figure of forward.json."""
    cells = [(Cell(**entry["cell"]), entry["result"]) for entry in value["cells"]]
    return {figure: [cells[index] for index in rows] for figure, rows in value["figures"].items()}
