"""One point of a sweep: what is computed, and its deviations."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from .blocks import Blocks
from .formats import NumberFormat, parse_format
from .inputs import QKV, draw, read_inputs
from .metrics import deviation
from .rounding_bias import measure_bias
from .simulate import (
    baseline_attention,
    check_inputs,
    flash_attention,
    golden_attention,
    ordered_products,
    renormalised_attention,
)
from .steps import Steps, find_preset

Result = dict[str, dict[str, list[float]]]
_BATCH_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Cell:
    """The configuration of one point.

    Args:
        preset: name of a preset.
        format: name of a number format.
        inputs: name of a distribution, or a file of captured tensors.
        seqlen: rows of q, k and v (0 with captured tensors).
        head_dim: columns (0 with captured tensors).
        block_r: rows of a tile.
        block_c: keys of a block.
        seeds: how many draws.
        only: rounds this step alone.
        exempt: rounds every step of the preset but this one.
        steps: (step, format) pairs, in the place of the preset's.
        kind: "attention", or "bias" for the experiment on biased rounding of P V.
        ties: with "bias": how many keys share the maximum of a row.
        shifted: with "bias": whether the maximum is moved so that no P is exactly 1.
        exact_order: sums products in one fixed order, tile by tile.
    """

    preset: str = "paper"
    format: str = "bf16"
    inputs: str = "uniform"
    seqlen: int = 1024
    head_dim: int = 64
    block_r: int = 64
    block_c: int = 64
    seeds: int = 8
    only: str = ""
    exempt: str = ""
    steps: tuple[tuple[str, str], ...] = ()
    kind: str = "attention"
    ties: int = 0
    shifted: bool = False
    exact_order: bool = False

    def identity(self) -> str:
        return identity(asdict(self))

    def check(self) -> None:
        """Finds unknown names and sizes before anything is computed.

        Raises:
            ArgumentError: what is unknown.
        """
        preset = find_preset(self.preset)
        self.number_formats()
        blocks = Blocks(self.block_r, self.block_c)
        power = blocks.keys & (blocks.keys - 1) == 0
        if preset.algorithm == "running" and not power:
            raise ArgumentError(
                f"block_c: expected a power of two with the preset {preset.name}, got {blocks.keys}"
            )
        if preset.split_size % blocks.keys:
            raise ArgumentError(
                f"block_c: expected a divisor of the split size {preset.split_size} with the "
                f"preset {preset.name}, got {blocks.keys}"
            )
        for name, value in (("seqlen", self.seqlen), ("head_dim", self.head_dim)):
            if value < 1 and not self.inputs.endswith(".pt"):
                raise ArgumentError(f"{name}: expected at least 1, got {value}")
        if self.seeds < 1:
            raise ArgumentError(f"seeds: expected at least 1, got {self.seeds}")

    def number_formats(self) -> tuple[NumberFormat, Steps]:
        """Returns the format, and that of each step."""
        number_format = parse_format(self.format)
        steps = find_preset(self.preset).steps(number_format)
        if self.only:
            steps = Steps.parse({self.only: self.format})
        if self.exempt:
            steps = steps.without(self.exempt)
        if self.steps:
            steps = Steps.parse(dict(self.steps))
        return number_format, steps


def identity(value: Any) -> str:
    """Returns a hash of a JSON value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_cell(cell: Cell) -> Result:
    """Computes one cell.

    Returns:
        {"flash": ..., "baseline": ..., "difference": ...}: the deviations of both attentions from
        float64, and of the one from the other; each metric a list of one number per seed (per
        head with captured tensors).
    """
    if cell.kind == "bias":
        return measure_bias(cell.format, cell.inputs, cell.ties, cell.shifted, cell.seeds)
    results: list[Result] = []
    for number, (q, k, v) in enumerate(_batches(cell)):
        results.append(_compare(cell, q, k, v, seed=number))
    first = results[0]
    return {
        pair: {metric: [x for r in results for x in r[pair][metric]] for metric in first[pair]}
        for pair in first
    }


def _batches(cell: Cell) -> list[QKV]:
    if cell.inputs.endswith(".pt"):
        return read_inputs(Path(cell.inputs))
    drawn = [draw(cell.inputs, seed, cell.seqlen, cell.head_dim) for seed in range(cell.seeds)]
    size = max(1, _BATCH_ELEMENTS // cell.seqlen**2)
    groups = [drawn[start : start + size] for start in range(0, len(drawn), size)]
    return [
        (torch.stack(q), torch.stack(k), torch.stack(v))
        for q, k, v in (zip(*group, strict=True) for group in groups)
    ]


def _compare(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: int) -> Result:
    number_format, steps = cell.number_formats()
    generator = torch.Generator().manual_seed(seed)
    # Golden values are those of the rounded inputs: what counts is the computation.
    plain = parse_format(cell.format.partition(":")[0])
    container = torch.float64 if number_format.container == torch.float64 else torch.float32
    q, k, v = (plain.round(tensor).to(container) for tensor in (q, k, v))
    check_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5
    blocks = Blocks(cell.block_r, cell.block_c)
    golden = golden_attention(q, k, v, scale)
    baseline = baseline_attention(q, k, v, scale, number_format, generator)
    if cell.exact_order:
        flash = _in_order(q, k, v, scale, steps, blocks, generator)
    else:
        flash = flash_attention(q, k, v, scale, find_preset(cell.preset), steps, blocks, generator)
    return {
        "flash": deviation(flash, golden, plain),
        "baseline": deviation(baseline, golden, plain),
        "difference": deviation(flash, baseline.double(), plain),
    }


def _in_order(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    steps: Steps,
    blocks: Blocks,
    generator: torch.Generator,
) -> torch.Tensor:
    return renormalised_attention(
        q, k, v, scale, steps, blocks, generator, products=ordered_products
    )
