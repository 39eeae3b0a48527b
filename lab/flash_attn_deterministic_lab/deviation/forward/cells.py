"""One point of a sweep: what is computed, and its deviations."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..attentions.masks import Call
from ..attentions.registry import find_attention, gradients_of
from ..emulate.explicit import explicit_attention, golden_attention
from ..emulate.gradients import DELTAS
from ..emulate.simulate import tiled_attention
from ..emulate.steps import PRESETS, Steps
from ..numbers.formats import NumberFormat, parse_format
from ..numbers.metrics import Metrics, deviation
from .inputs import draw

Result = dict[str, Metrics]
_BATCH_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Cell:
    """The configuration of one point."""

    preset: str = "paper"
    format: str = "bf16"
    inputs: str = "uniform"  # a distribution
    seqlen: int = 1024  # rows of q, k and v
    head_dim: int = 64
    # Keys of a block: the kernels', and ceil(M / 4d) of FlashAttention's algorithm 1 where M, the
    # on-chip memory, has 16384 elements.
    block_c: int = 64
    seeds: int = 8  # draws
    only: str = ""  # rounds these steps alone, with a + between them
    exempt: str = ""  # rounds every step of the preset but these
    kind: str = "attention"  # "gradients": dq, dk and dv

    def number_formats(self) -> tuple[NumberFormat, Steps]:
        """Returns the format, and that of each step."""
        number_format = parse_format(self.format)
        only, exempt = (steps.split("+") if steps else () for steps in (self.only, self.exempt))
        steps = PRESETS[self.preset].steps(number_format).items()
        return number_format, {
            name: f for name, f in steps if name in (only or (name,)) and name not in exempt
        }


def run_cell(cell: Cell) -> Result:
    """Computes one cell.

    Returns:
        {"flash": ..., "baseline": ..., "difference": ...}: the deviations of both attentions from
        float64, and of the one from the other; each metric a list of one number per seed. With
        "gradients" {"DELTA dq": ...} and so on, and "explicit" in the place of a delta.
    """
    run = _gradients if cell.kind == "gradients" else _compare
    results = list(run(cell))
    first = results[0]
    return {
        pair: {metric: [x for r in results for x in r[pair][metric]] for metric in first[pair]}
        for pair in first
    }


def _calls(cell: Cell) -> list[Call]:
    """The draws of a cell, as many in a call as memory allows.

    Golden values are those of the rounded inputs: what counts is the computation.
    """
    plain = parse_format(cell.format)
    drawn = [draw(cell.inputs, seed, cell.seqlen, cell.head_dim) for seed in range(cell.seeds)]
    size = max(1, _BATCH_ELEMENTS // cell.seqlen**2)
    groups = [drawn[start : start + size] for start in range(0, len(drawn), size)]
    calls = []
    for group in groups:
        stacked = (torch.stack(part) for part in zip(*group, strict=True))
        q, k, v = (plain.round(tensor).to(plain.container) for tensor in stacked)
        calls.append(Call(q, k, v))
    return calls


@functools.lru_cache(maxsize=8)
def _prepared(cell: Cell) -> list[tuple[Call, torch.Tensor, torch.Tensor]]:
    """Returns the calls of a cell with golden and baseline outputs, which many cells share."""
    prepared = []
    for call in _calls(cell):
        baseline = explicit_attention(call, parse_format(cell.format))
        prepared.append((call, golden_attention(call), baseline))
    return prepared


def _compare(cell: Cell) -> Iterator[Result]:
    number_format, steps = cell.number_formats()
    names = ("format", "inputs", "seqlen", "head_dim", "seeds")
    shared = _prepared(Cell(**{name: getattr(cell, name) for name in names}))
    for call, golden, baseline in shared:
        flash = tiled_attention(call, PRESETS[cell.preset], steps, cell.block_c)
        yield {
            "flash": deviation(flash, golden, number_format),
            "baseline": deviation(baseline, golden, number_format),
            "difference": deviation(flash, baseline.double(), number_format),
        }


def _gradients(cell: Cell) -> Iterator[Result]:
    number_format, _ = cell.number_formats()
    names = {delta: f"{cell.preset}:{cell.format}+{delta}" for delta in DELTAS}
    names["explicit"] = f"explicit:{cell.format}"
    attentions = {label: find_attention(name) for label, name in names.items()}
    for seed, call in enumerate(_calls(cell)):
        generator = torch.Generator().manual_seed(99 + seed)
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        dout = torch.randn(shape, generator=generator, dtype=torch.float64)
        dout = number_format.round(dout)
        golden = gradients_of(find_attention("exact"), call.to(torch.float64), dout)
        yield {
            f"{label} {name}": deviation(actual, exact, number_format)
            for label, attention in attentions.items()
            for name, actual, exact in zip(
                ("dq", "dk", "dv"), gradients_of(attention, call, dout.to(call.q.dtype)), golden,
                strict=True,
            )
        }  # fmt: skip
