"""Which cells each figure of the study of emulated attention is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..emulate.steps import LINES, PRESETS, STEP_NAMES, TILING
from ..numbers.formats import FORMAT_NAMES
from ..study.environment import Progress, one_thread
from ..study.files import new_result, write_result
from .cells import Cell, Result, run_cell
from .inputs import DISTRIBUTIONS

FOUR_FORMATS = ("bf16", "fp16", "fp32", "fp64")
Point = tuple[Cell, Result]
Points = list[Point]


@dataclass(frozen=True)
class Plan:
    """What a run of the study covers."""

    presets: tuple[str, ...] = ("paper", "kernel", "tree")  # the first: of single-preset figures
    figures: tuple[str, ...] = ("3", "4", "5", "6a", "6b", "6c", "ablation", "backward")
    inputs: tuple[str, ...] = DISTRIBUTIONS
    seeds: int = 8  # draws per point
    # Lengths of figure 5; the third from the end is that of the others.
    seqlens: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    head_dim: int = 64
    # M, on-chip memory in elements: B_c = B_r = 64 at head_dim 64, the kernels' block of keys.
    sram: int = 16384
    quick: bool = False  # whether sweeps are thinned

    def base(self) -> Cell:
        """B_c = ceil(M / 4d) keys of a block, as in FlashAttention's algorithm 1."""
        keys = math.ceil(self.sram / (4 * self.head_dim))
        return Cell(
            self.presets[0], inputs=self.inputs[0], seqlen=self.seqlen, head_dim=self.head_dim,
            block_c=keys, seeds=self.seeds,
        )  # fmt: skip

    @property
    def seqlen(self) -> int:
        """The length of the figures that don't sweep it."""
        return self.seqlens[max(0, len(self.seqlens) - 3)]

    @property
    def main_inputs(self) -> tuple[str, ...]:
        """The distributions of the figures that show two at most."""
        wanted = [name for name in ("uniform", "normal") if name in self.inputs]
        return tuple(wanted) or self.inputs[:1]


def quick_plan(plan: Plan) -> Plan:
    """Returns a plan of less than a minute: fewer draws, lengths and formats."""
    lengths = (64, 128, 256, 512)
    inputs = plan.main_inputs
    return replace(plan, seeds=min(plan.seeds, 3), seqlens=lengths, inputs=inputs, quick=True)


# --- Figures -----------------------------------------------------------------------------------


def _formats(plan: Plan) -> list[Cell]:
    base = plan.base()
    more = () if plan.quick else tuple(f"p{bits}" for bits in (5, 6, 7, 9, 10, 13, 15, 17, 20))
    return [
        replace(base, preset=preset, format=name, inputs=inputs)
        for preset in plan.presets
        for name in (*FORMAT_NAMES, *more)
        for inputs in plan.main_inputs
    ]


def _golden(plan: Plan) -> list[Cell]:
    base = plan.base()
    names = tuple(dict.fromkeys((*plan.presets, *PRESETS)))
    return [
        replace(base, preset=preset, format=name, inputs=inputs)
        for preset in names
        for name in (FOUR_FORMATS if preset in plan.presets else FOUR_FORMATS[:2])
        for inputs in plan.inputs
    ]


def _lengths(plan: Plan) -> list[Cell]:
    base = plan.base()
    return [
        replace(base, preset=preset, inputs=inputs, seqlen=seqlen)
        for preset in plan.presets
        for inputs in (plan.inputs if preset == "paper" else plan.main_inputs)
        for seqlen in plan.seqlens
    ]


def _sweep(plan: Plan, cells: Callable[[Cell], Iterable[Cell]]) -> list[Cell]:
    """What figure 6 has of each format and distribution, preset paper."""
    base = replace(plan.base(), preset="paper")
    return [
        cell
        for name in (FOUR_FORMATS[:1] if plan.quick else FOUR_FORMATS)
        for inputs in plan.main_inputs
        for cell in cells(replace(base, format=name, inputs=inputs))
    ]


def _swapped(plan: Plan) -> list[Cell]:
    """Tiles of B_c = M/4d keys and B_r = min(M/4d, d) rows, each before the same with both swapped.

    Rows of a tile do not touch each other: keys are all that the arithmetic sees.
    """
    sizes = (2, 8) if plan.quick else (2, 4, 8)
    keys = [factor * plan.head_dim for factor in sizes if factor * plan.head_dim <= plan.seqlen]
    pairs = [n for size in keys for n in (size, plan.head_dim)]
    return _sweep(plan, lambda cell: [replace(cell, block_c=n) for n in pairs])


def _square(plan: Plan) -> list[Cell]:
    """Square tiles, each before one of the same area with four times as many keys as rows."""
    sides = (16, 64) if plan.quick else (8, 16, 32, 64, 128, 256)
    pairs = [n for side in sides if 2 * side <= plan.seqlen for n in (side, 2 * side)]
    return _sweep(plan, lambda cell: [replace(cell, block_c=n) for n in pairs])


def _larger(plan: Plan) -> list[Cell]:
    sizes = (16, 64, 256) if plan.quick else (8, 16, 32, 64, 128, 256, 512)
    fitting = [size for size in sizes if size <= plan.seqlen]
    return _sweep(plan, lambda cell: (replace(cell, block_c=size) for size in fitting))


def _ablation(plan: Plan) -> list[Cell]:
    """Each step alone, all but it; all that tiling adds, and all within a line, the same way."""
    base = replace(plan.base(), preset="paper")
    cells = []
    for inputs in plan.main_inputs:
        cell = replace(base, inputs=inputs)
        cells.append(cell)
        for steps in (*STEP_NAMES, TILING, LINES):
            cells += [replace(cell, only=steps), replace(cell, exempt=steps)]
    return cells


def _backward(plan: Plan) -> list[Cell]:
    base = replace(plan.base(), preset="kernel", kind="gradients")
    return [
        replace(base, format=name, inputs=inputs, seqlen=seqlen)
        for name in ("bf16", "fp16")
        for inputs in plan.inputs
        for seqlen in plan.seqlens[-5:-2]
    ]


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
    figures = {name: FIGURES[name](plan) for name in plan.figures}
    unique = list(dict.fromkeys(cell for cells in figures.values() for cell in cells))
    place = {cell: index for index, cell in enumerate(unique)}
    found = []
    start, progress = time.monotonic(), Progress("forward", len(unique))
    with one_thread():
        for cell in unique:
            found.append({"cell": _differing(cell), "result": run_cell(cell)})
            progress.advance(f"{cell.preset} {cell.format} {cell.inputs} {cell.seqlen}")
    value = {
        **new_result("forward", asdict(plan)),
        "seconds": time.monotonic() - start,
        "figures": {name: [place[cell] for cell in cells] for name, cells in figures.items()},
        "cells": found,
    }
    write_result(folder, value)
    return value


def _differing(cell: Cell) -> dict[str, Any]:
    """A cell's fields that are not what `Cell()` has."""
    plain = asdict(Cell())
    return {name: value for name, value in asdict(cell).items() if value != plain[name]}


def forward_points(value: dict[str, Any]) -> dict[str, Points]:
    """Returns the cells and results of each figure of forward.json."""
    cells = [(Cell(**entry["cell"]), entry["result"]) for entry in value["cells"]]
    return {figure: [cells[index] for index in rows] for figure, rows in value["figures"].items()}
