"""The forward study: which cells each figure is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .blocks import blocks_of_sram, check_fit
from .cells import Cell
from .files import read_json, write_json
from .formats import FORMAT_NAMES, parse_format
from .inputs import DISTRIBUTIONS, digest, read_inputs
from .steps import PRESETS, STEP_NAMES, find_preset
from .study import SCHEMA, environment, open_study, run_cells, stopwatch

DEFAULT_SRAM = 16384  # elements: B_c = B_r = 64 at head_dim 64, the kernels' block of keys
RESULT_FILE = "forward.json"


@dataclass(frozen=True)
class Plan:
    """What a run of the forward study covers.

    Args:
        presets: names; the first is what single-preset figures show.
        figures: names of FIGURES.
        inputs: names of distributions, or a file of captured tensors.
        seeds: draws per point.
        seqlens: lengths of figures 4 and 5; the third from the end is that of the others.
        head_dim: d.
        sram: M in elements.
        block_r: rows of a tile in the place of what M gives.
        block_c: keys of a block in the place of what M gives.
        formats: of figure 3.
        quick: whether sweeps are thinned.
    """

    presets: tuple[str, ...] = ("paper", "kernel", "tree")
    figures: tuple[str, ...] = ()
    inputs: tuple[str, ...] = DISTRIBUTIONS
    seeds: int = 8
    seqlens: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    head_dim: int = 64
    sram: int = DEFAULT_SRAM
    block_r: int | None = None
    block_c: int | None = None
    formats: tuple[str, ...] = ()
    quick: bool = False

    def base(self) -> Cell:
        blocks = blocks_of_sram(self.sram, self.head_dim)
        if self.block_r is not None or self.block_c is not None:
            blocks = replace(
                blocks, rows=self.block_r or blocks.rows, keys=self.block_c or blocks.keys
            )
            check_fit(blocks, self.sram, self.head_dim)
        return Cell(
            preset=self.presets[0],
            inputs=self.inputs[0],
            seqlen=self.seqlen,
            head_dim=self.head_dim,
            block_r=blocks.rows,
            block_c=blocks.keys,
            seeds=self.seeds,
        )

    @property
    def seqlen(self) -> int:
        """The length of the figures that don't sweep it."""
        return self.seqlens[max(0, len(self.seqlens) - 3)]

    def lengths(self, inputs: str) -> tuple[int, ...]:
        """The lengths to sweep; captured tensors have their own."""
        return (self.seqlen,) if inputs.endswith(".pt") else self.seqlens

    @property
    def main_inputs(self) -> tuple[str, ...]:
        """The distributions of the figures that show two at most."""
        wanted = [name for name in ("uniform", "normal") if name in self.inputs]
        return tuple(wanted) or self.inputs[:1]

    def check(self) -> None:
        """Raises ArgumentError for what is unknown or doesn't fit."""
        for name in self.presets:
            find_preset(name)
        for name in self.figures:
            if name not in FIGURES:
                raise ArgumentError(f"figures: expected {', '.join(FIGURES)} or all, got {name!r}")
        for name in self.inputs:
            if name.endswith(".pt"):
                read_inputs(Path(name))
            elif name not in DISTRIBUTIONS:
                raise ArgumentError(
                    f"inputs: expected one of {', '.join(DISTRIBUTIONS)} or a .pt file of "
                    f"captured tensors, got {name!r}"
                )
        for name in self.formats:
            parse_format(name)
        for figure in self.figures:
            for cell in FIGURES[figure](self):
                cell.check()

    def configuration(self) -> dict[str, Any]:
        captured = {name: digest(Path(name)) for name in self.inputs if name.endswith(".pt")}
        return {**asdict(self), "captured": captured}


def quick_plan(plan: Plan) -> Plan:
    """Returns a plan of less than a minute: fewer draws, lengths and formats."""
    return replace(
        plan,
        seeds=min(plan.seeds, 3),
        seqlens=(64, 128, 256, 512),
        inputs=plan.main_inputs,
        quick=True,
    )


# --- Figures -----------------------------------------------------------------------------------


def _formats(plan: Plan) -> list[Cell]:
    base = plan.base()
    names = plan.formats or FORMAT_NAMES
    if not plan.formats and not plan.quick:
        names = (*names, *(f"p{bits}" for bits in (5, 6, 7, 9, 10, 13, 15, 17, 20)))
    return [
        replace(base, preset=preset, format=name, inputs=inputs)
        for preset in plan.presets
        for name in names
        for inputs in plan.main_inputs
    ]


def _golden(plan: Plan) -> list[Cell]:
    base = plan.base()
    return [
        replace(base, preset=preset, format=name, inputs=inputs)
        for preset in plan.presets
        for name in ("bf16", "fp16", "fp32")
        for inputs in plan.inputs
    ]


def _lengths(plan: Plan) -> list[Cell]:
    base = plan.base()
    return [
        replace(base, preset=preset, inputs=inputs, seqlen=seqlen)
        for preset in plan.presets
        for inputs in (plan.inputs if preset == "paper" else plan.main_inputs)
        for seqlen in plan.lengths(inputs)
        # Half a minute each with the kernels' order of operations, which is not vectorised.
        if preset != "tree" or seqlen <= 2048
    ]


def _srams(plan: Plan) -> tuple[int, ...]:
    factors = (0.25, 1, 4) if plan.quick else (0.25, 0.5, 1, 2, 4, 8)
    return tuple(int(plan.sram * factor) for factor in factors)


def _shapes(plan: Plan, *shapes: str) -> list[Cell]:
    base = replace(plan.base(), preset="paper")
    cells = []
    for inputs in plan.main_inputs:
        for sram in _srams(plan):
            for shape in shapes:
                blocks = blocks_of_sram(sram, plan.head_dim, shape)
                cells.append(replace(base, inputs=inputs, block_r=blocks.rows, block_c=blocks.keys))
    return cells


def _swapped(plan: Plan) -> list[Cell]:
    return _shapes(plan, "paper", "swapped")


def _square(plan: Plan) -> list[Cell]:
    return _shapes(plan, "paper", "square")


def _larger(plan: Plan) -> list[Cell]:
    base = replace(plan.base(), preset="paper")
    sizes = (16, 64, 256) if plan.quick else (8, 16, 32, 64, 128, 256, 512)
    return [
        replace(base, inputs=inputs, block_c=size, format=name)
        for inputs in plan.main_inputs
        for name in (("bf16",) if plan.quick else ("bf16", "fp16"))
        for size in sizes
        if size <= plan.seqlen
    ]


def _rows_only(plan: Plan) -> list[Cell]:
    """B_r alone, each tile computed by itself and every product summed in one order."""
    base = replace(plan.base(), preset="paper", exact_order=True, seqlen=min(plan.seqlen, 512))
    sizes = (16, 64) if plan.quick else (16, 32, 64, 128)
    return [
        replace(base, inputs=inputs, block_r=size, seeds=min(plan.seeds, 4))
        for inputs in plan.main_inputs
        for size in sizes
    ]


def _ablation(plan: Plan) -> list[Cell]:
    base = plan.base()
    cells = []
    for preset in plan.presets:
        steps = STEP_NAMES if preset == "paper" else PRESETS[preset].rounded
        for inputs in plan.main_inputs:
            cell = replace(base, preset=preset, inputs=inputs)
            cells.append(cell)
            cells += [replace(cell, only=step) for step in steps]
            if preset == "paper":
                cells += [replace(cell, exempt=step) for step in steps]
    return cells


def _stochastic(plan: Plan) -> list[Cell]:
    base = replace(plan.base(), preset="paper")
    return [
        replace(base, inputs=inputs, seqlen=seqlen, format=name)
        for inputs in plan.main_inputs
        for seqlen in plan.lengths(inputs)[-4:-1] or plan.lengths(inputs)
        for name in ("bf16", "bf16:sr")
    ]


def _bias(plan: Plan) -> list[Cell]:
    base = Cell(kind="bias", preset="kernel", seeds=2 * plan.seeds)
    return [
        replace(base, format=name, inputs=values, ties=ties, shifted=shifted)
        for name in ("bf16", "bf16:sr")
        for values in ("one_sign", "two_signs")
        for ties in (1, 2, 3, 4, 8)
        for shifted in (False, True)
    ]


FIGURES: dict[str, Callable[[Plan], list[Cell]]] = {
    "3": _formats,
    "4": _golden,
    "5": _lengths,
    "6a": _swapped,
    "6b": _square,
    "6c": _larger,
    "rows": _rows_only,
    "ablation": _ablation,
    "stochastic": _stochastic,
    "bias": _bias,
}


def run_forward(plan: Plan, folder: Path, jobs: int = 1, force: bool = False) -> dict[str, Any]:
    """Runs or resumes the study in a folder, and writes its forward.json.

    Args:
        plan: what to cover.
        folder: of the study; cells that are there already are not computed again.
        jobs: processes.
        force: whether another study in the folder is replaced.

    Returns:
        The content of forward.json: {"figures": {name: [cell identity]}, "cells": {identity:
        {"cell", "result"}}, ...}.

    Raises:
        ArgumentError: the plan or the folder is not usable.
    """
    plan.check()
    key = open_study(folder, "forward", plan.configuration(), force)
    figures = {name: FIGURES[name](plan) for name in plan.figures}
    unique = {cell.identity(): cell for cells in figures.values() for cell in cells}
    before = _seconds(folder)
    with stopwatch() as taken:
        results = run_cells(folder, list(unique.values()), jobs, "forward")
    value = {
        "kind": "forward",
        "schema": SCHEMA,
        "hash": key,
        "configuration": plan.configuration(),
        "environment": environment(),
        "seconds": before + taken[0],
        "figures": {name: [cell.identity() for cell in cells] for name, cells in figures.items()},
        "cells": {
            name: {"cell": _differing(cell), "result": results[name]}
            for name, cell in unique.items()
        },
    }
    write_json(folder / RESULT_FILE, value)
    return value


def _seconds(folder: Path) -> float:
    path = folder / RESULT_FILE
    return float(read_json(path).get("seconds", 0.0)) if path.exists() else 0.0


def _differing(cell: Cell) -> dict[str, Any]:
    """A cell's fields that are not what `Cell()` has."""
    plain = asdict(Cell())
    return {name: value for name, value in asdict(cell).items() if value != plain[name]}


def read_forward(path: Path) -> dict[str, list[tuple[Cell, Any]]]:
    """Reads forward.json.

    Returns:
        The cells and results of each figure.

    Raises:
        ArgumentError: the file is no result of a forward study.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != "forward":
        raise ArgumentError(f"{path}: expected the result of a forward study")
    if value.get("schema") != SCHEMA:
        raise ArgumentError(f"{path}: expected schema {SCHEMA}, got {value.get('schema')}")
    cells = {}
    for name, entry in value["cells"].items():
        steps = tuple(tuple(pair) for pair in entry["cell"].get("steps", ()))
        cells[name] = (Cell(**{**entry["cell"], "steps": steps}), entry["result"])
    return {figure: [cells[name] for name in names] for figure, names in value["figures"].items()}
