"""Claims that the study of emulated attention tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ..emulate.steps import TILING
from ..forward.cells import Cell
from ..forward.plan import FOUR_FORMATS, Point, Points
from ..numbers.intervals import Interval, median_interval
from .judging import Case, Claim, Range, emulated, range_text, ratio, title

PAPER = "Golden et al. 2024"
NEWER = "Qiu and Yao 2025, arXiv 2510.04212"
OURS = "this project"

# Ranges that the intervals are held against.
TENFOLD = (5.0, 20.0)  # "roughly an order of magnitude"
MORE = (1.1, float("inf"))  # more than the other by more than a tenth
GROWS = (1.5, float("inf"))  # from the shortest to the longest, or from early to late
SAME = (0.8, 1.25)  # "no significant effect"
FALLS = (0.0, 0.8)  # from the smallest block to the largest
D_MATTERS = (3.0, float("inf"))  # error with D from the rounded O over that with D from the exact O
D_CURED = (0.0, 1.1)  # error with D from O and its residual over that with D from the exact O

_LENGTHS = "length {first} to {last}"


def _groups(points: Points) -> Iterable[tuple[str, Points]]:
    """Cells by preset and inputs."""
    found: dict[str, Points] = {}
    for cell, result in points:
        name = f"preset {cell.preset}, {title(cell.inputs)}"
        found.setdefault(name, []).append((cell, result))
    return found.items()


def _falling(points: Points) -> Iterator[Case]:
    for name, group in _groups(points):
        there = {cell.format: result["difference"]["max"] for cell, result in group}
        order = [there[f] for f in FOUR_FORMATS if f in there]
        steps = [ratio(wide, narrow) for narrow, wide in itertools.pairwise(order)]
        worst = max(steps, key=lambda step: step.high)
        yield Case(name, worst, *FALLS, "x at the format with the least fall")


def _over_baseline(where: str, wanted: Range, points: Points) -> Iterator[Case]:
    """Flash over baseline."""
    for name, group in _groups(points):
        for cell, result in group:
            value = ratio(result["flash"]["max"], result["baseline"]["max"])
            place = where.format(format=cell.format.upper(), seqlen=cell.seqlen)
            yield Case(f"{name}, {place}", value, *wanted, "x")


def _ends(
    axis: str, where: str, wanted: Range, metrics: Sequence[str], points: Points
) -> Iterator[Case]:
    """The largest of a field of the cells over the smallest, in each format."""
    for name, group in _groups(points):
        for number_format in FOUR_FORMATS:
            there = [point for point in group if point[0].format == number_format]
            there.sort(key=lambda point: getattr(point[0], axis))
            for metric in metrics if there else ():
                place = where.format(
                    format=number_format.upper(), metric=metric,
                    first=getattr(there[0][0], axis), last=getattr(there[-1][0], axis),
                )  # fmt: skip
                value = _difference(there[-1], there[0], metric)
                yield Case(f"{name}, {place}", value, *wanted, "x")


def _difference(above: Point, below: Point, metric: str = "max") -> Interval:
    return ratio(above[1]["difference"][metric], below[1]["difference"][metric])


def _where(cell: Cell) -> str:
    return f"{cell.format.upper()}, {title(cell.inputs)}"


def _paired(label: str, wanted: Range, points: Points) -> Iterator[Case]:
    """The second of each pair of cells over the first."""
    for first, second in zip(points[::2], points[1::2], strict=True):
        keys = f"{first[0].block_c} to {second[0].block_c} keys per block"
        yield Case(f"{label}, {_where(first[0])}, {keys}", _difference(second, first), *wanted, "x")


def _share(steps: str, points: Points) -> Iterator[Case]:
    """Rounding these steps alone makes at least half of the deviation, and all others less."""
    for name, group in _groups(points):
        shown = {(c.only, c.exempt): r["flash"]["max"] for c, r in group}
        share = {steps: ratio(found, shown["", ""]) for steps, found in shown.items()}
        single = {only: value for (only, _), value in share.items() if only and "+" not in only}
        order = sorted(single, key=lambda step: -single[step].middle)[:3]
        text = ", ".join(f"{step.replace('_', ' ')} {single[step].middle:.0%}" for step in order)
        unit = " of the whole"
        yield Case(f"{name}, alone", share[steps, ""], 0.5, unit=unit, note=f"; largest: {text}")
        yield Case(f"{name}, all but these", share["", steps], high=0.5, unit=unit)


def _deltas(above: str, wanted: Range, points: Points) -> Iterator[Case]:
    """The error with D from `above` over that with D from the exact O."""
    for (cell, result), gradient in itertools.product(points, ("dq", "dk")):
        error = result[f"{above} {gradient}"]["relative"]
        name = f"{_where(cell)}, length {cell.seqlen}, {gradient}"
        note = f" (error {median_interval(error).middle:.2g})"
        value = ratio(error, result[f"exact {gradient}"]["relative"])
        yield Case(name, value, *wanted, "x", note)


FORWARD_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "formats", f"{PAPER}, Fig. 3",
        "The difference between flash and baseline attention falls with every wider number format.",
        f"max |flash - baseline|, a format over the next narrower of BF16, FP16, FP32, FP64: "
        f"{range_text(*FALLS)} at every step.",
        emulated("3"), _falling,
    ),
    Claim(
        "tenfold", f"{PAPER}, abstract and Fig. 4",
        "At BF16, flash attention deviates about ten times as much as baseline attention.",
        f"max |output - FP64|, flash over baseline: {range_text(*TENFOLD)}.",
        emulated("5"), partial(_over_baseline, "length {seqlen}", TENFOLD),
    ),
    Claim(
        "more", f"{PAPER}, Fig. 4",
        "Flash attention is further from the FP64 value than baseline attention.",
        f"The same ratio in BF16 and FP16: {range_text(*MORE)}.",
        emulated("4"), partial(_over_baseline, "{format}", MORE),
    ),
    Claim(
        "length-max", f"{PAPER}, Fig. 5a",
        "The largest difference between the two grows with the sequence length.",
        f"max |flash - baseline|, BF16, the longest over the shortest: {range_text(*GROWS)}.",
        emulated("5"), partial(_ends, "seqlen", _LENGTHS, GROWS, ("max",)),
    ),
    Claim(
        "length-relative", f"{OURS}, on Fig. 5a",
        "So does the largest difference relative to the largest output.",
        f"max |flash - baseline| / max |baseline|: {range_text(*GROWS)}.",
        emulated("5"), partial(_ends, "seqlen", _LENGTHS, GROWS, ("max_relative",)),
    ),
    Claim(
        "length-mean", f"{PAPER}, Fig. 5b",
        "Mean and spread of the difference grow with the sequence length.",
        "mean |flash - baseline|, and the standard deviation of flash - baseline, BF16: "
        f"{range_text(*GROWS)}.",
        emulated("5"), partial(_ends, "seqlen", f"{{metric}}, {_LENGTHS}", GROWS, ("mean", "std")),
    ),
    Claim(
        "swapped", f"{PAPER}, Fig. 6a",
        "Swapping the dimensions of a block makes the difference from baseline larger.",
        "max |flash - baseline|, swapped (B_c = d, B_r = M/4d) over the paper's (B_c = M/4d, "
        f"B_r = d; M/4d > d), BF16 and FP16: {range_text(*MORE)}.",
        emulated("6a"), partial(_paired, "swapped", MORE),
    ),
    Claim(
        "square", f"{PAPER}, Fig. 6b",
        "Whether a block is square has no effect on the difference from baseline.",
        "max |flash - baseline|, four times as many keys as rows over square blocks of equal area, "
        f"BF16 and FP16: {range_text(*SAME)}.",
        emulated("6b"), partial(_paired, "wide", SAME),
    ),
    Claim(
        "larger", f"{PAPER}, Fig. 6c",
        "Larger blocks lower the difference from baseline.",
        f"max |flash - baseline|, largest over smallest B_c: {range_text(*FALLS)}.",
        emulated("6c"),
        partial(_ends, "block_c", "{format}, B_c = {first} to {last}", FALLS, ("max",)),
    ),
    Claim(
        "rescale", f"{PAPER}, explanation of Fig. 6c as we read it",
        "The rescaling factors that tiling adds are where the deviation comes from.",
        "BF16 in the factors exp(m_before - m_after) alone: at least half of the whole deviation; "
        "in all other steps: at most half.",
        emulated("ablation"), partial(_share, "rescale"),
    ),
    Claim(
        "tiling", f"{OURS}, on the same",
        "Rounding the factors and everything that is multiplied by them makes at least half.",
        "The same for the factors, their products with l, O and P V, and the sum of the last two.",
        emulated("ablation"), partial(_share, TILING),
    ),
    Claim(
        "d-matters", OURS,
        "D = rowsum(dO * O) from the rounded O makes most of the error of dq and dk.",
        "Emulated kernels: relative error of dq and dk with D from the rounded O over that with D "
        f"from O before rounding: {range_text(*D_MATTERS)}.",
        emulated("backward"), partial(_deltas, "rounded", D_MATTERS),
    ),
    Claim(
        "d-cure", OURS,
        "Keeping what rounding took from O in a second 16-bit tensor removes this error.",
        f"The same with D from O and its residual: {range_text(*D_CURED)}.",
        emulated("backward"), partial(_deltas, "residual", D_CURED),
    ),
    Claim(
        "d-cure-8", OURS,
        "A residual of 8 bits, in units of 1/256 gap at O, removes it as well.",
        f"The same with an 8-bit residual: {range_text(*D_CURED)}.",
        emulated("backward"), partial(_deltas, "residual8", D_CURED),
    ),
)  # fmt: skip
