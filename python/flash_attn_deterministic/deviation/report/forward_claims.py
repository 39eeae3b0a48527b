"""Claims that the study of emulated attention tests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from ..forward.cells import Cell, Result
from ..forward.plan import FOUR_FORMATS, ON_CHIP, TILING, Points
from ..numbers.intervals import Interval, mean_interval, median_interval
from .judging import Case, Claim, emulated, range_text, ratio
from .names import inputs_of, presets_of, select, title

PAPER = "Golden et al. 2024"
NEWER = "Qiu and Yao 2025, arXiv 2510.04212"
OURS = "this project"

# Ranges that the intervals are held against.
TENFOLD = (5.0, 20.0)  # "roughly an order of magnitude"
MORE = (1.1, float("inf"))  # more than the other by more than a tenth
GROWS = (1.5, float("inf"))  # from the shortest to the longest, or from early to late
FALLS = (0.0, 0.8)  # from the smallest block to the largest
SAME = (1 / 1.25, 1.25)  # no significant effect
BIAS_ULP = 0.05  # mean error in gaps of the format from which one is called biased
D_MATTERS = (3.0, float("inf"))  # error with D from the rounded O over that with D from the exact O
D_CURED = (0.0, 1.1)  # error with D from O and its residual over that with D from the exact O

Group = tuple[str, Points]


def _groups(points: Points) -> list[Group]:
    """Cells by preset and inputs."""
    found = [
        (f"preset {preset}, {title(inputs)}", select(points, preset=preset, inputs=inputs))
        for preset in presets_of(points)
        for inputs in inputs_of(points)
    ]
    return [group for group in found if group[1]]


def _falling(points: Points) -> list[Case]:
    cases = []
    for name, group in _groups(points):
        there = {cell.format: result["difference"]["max"] for cell, result in group}
        order = [there[f] for f in FOUR_FORMATS if f in there]
        steps = [ratio(wide, narrow) for narrow, wide in itertools.pairwise(order)]
        worst = max(steps, key=lambda step: step.high)
        cases.append(Case(name, worst, *FALLS, unit="x at the format with the least fall"))
    return cases


def _over_baseline(metric: str = "max") -> Callable[[Result], Interval]:
    return lambda result: ratio(result["flash"][metric], result["baseline"][metric])


def _tenfold(points: Points) -> list[Case]:
    return [
        Case(f"{name}, length {cell.seqlen}", _over_baseline()(result), *TENFOLD, unit="x")
        for name, group in _groups(points)
        for cell, result in group
    ]


def _more(points: Points) -> list[Case]:
    low = [(c, r) for c, r in points if c.format in FOUR_FORMATS[:2]]
    return [
        Case(f"{name}, {cell.format.upper()}", _over_baseline()(result), *MORE, unit="x")
        for name, group in _groups(low)
        for cell, result in group
    ]


def _growth(*metrics: str) -> Callable[[Points], list[Case]]:
    def cases(points: Points) -> list[Case]:
        found = []
        for name, group in _groups(points):
            ends = sorted(group, key=lambda point: point[0].seqlen)
            (first, before), (last, after) = ends[0], ends[-1]
            where = f", length {first.seqlen} to {last.seqlen}"
            for metric in metrics:
                label = f"{name}, {metric}" if len(metrics) > 1 else name
                value = ratio(after["difference"][metric], before["difference"][metric])
                found.append(Case(label + where, value, *GROWS, unit="x"))
        return found

    return cases


def _difference(above: Result, below: Result) -> Interval:
    return ratio(above["difference"]["max"], below["difference"]["max"])


def _swapped(points: Points) -> list[Case]:
    """Three cells for each memory size: the paper's sizes, these exchanged, loops exchanged."""
    cases = []
    for (cell, result), (_, sizes), (loops, on_chip) in zip(*(points[n::3] for n in range(3)),
                                                           strict=True):  # fmt: skip
        if loops.exempt != ON_CHIP:
            raise ValueError("figure 6a: expected triples of cells")
        where = f"{cell.format.upper()}, {title(cell.inputs)}, M/4d = {cell.block_c}"
        for label, other in (("sizes", sizes), ("loops", on_chip)):
            value = _difference(other, result)
            name = f"{label} exchanged, {where}"
            cases.append(Case(name, value, *SAME, unit="x", outside=True))
    return cases


def _square(points: Points) -> list[Case]:
    """Three cells for each area: square, wide, tall."""
    cases = []
    for (cell, square), (_, wide), (_, tall) in zip(*(points[n::3] for n in range(3)), strict=True):
        where = f"{cell.format.upper()}, {title(cell.inputs)}, area {cell.block_r * cell.block_c}"
        for label, other in (("wide", wide), ("tall", tall)):
            cases.append(
                Case(f"square over {label}, {where}", _difference(square, other), *SAME, unit="x")
            )
    return cases


def _larger(points: Points) -> list[Case]:
    cases = []
    for name, group in _groups(points):
        for number_format in FOUR_FORMATS:
            here = sorted(select(group, format=number_format), key=lambda p: p[0].block_c)
            if here:
                where = f", B_c = {here[0][0].block_c} to {here[-1][0].block_c}"
                value = _difference(here[-1][1], here[0][1])
                label = f"{name}, {number_format.upper()}{where}"
                cases.append(Case(label, value, *FALLS, unit="x"))
    return cases


def _alone(steps: str, points: Points) -> list[Case]:
    """What rounding some steps alone makes of the whole deviation: at least half."""
    cases = []
    for name, group in _groups(points):
        whole = next(r for c, r in group if not c.only and not c.exempt)["flash"]["max"]
        alone = {c.only: ratio(r["flash"]["max"], whole) for c, r in group if c.only}
        single = {step: value for step, value in alone.items() if "+" not in step}
        order = sorted(single, key=lambda step: -single[step].middle)[:3]
        text = ", ".join(f"{step.replace('_', ' ')} {single[step].middle:.0%}" for step in order)
        value, note = alone[steps], f"; largest: {text}"
        cases.append(Case(name, value, 0.5, unit=" of the whole", note=note))
    return cases


def _bias(points: Points) -> list[Case]:
    """Towards or away from zero where it is expected, and nothing where it is not."""
    wanted = (
        ("two keys at the maximum", "bf16", "one_sign", 2, False, "product", 1),
        ("four keys", "bf16", "one_sign", 4, False, "product", 1),
        ("one key, small terms lost", "bf16", "one_sign", 1, False, "product", -1),
        ("two keys, V of both signs", "bf16", "two_signs", 2, False, "product", 0),
        ("two keys, maximum moved so that P < 1", "bf16", "one_sign", 2, True, "product", 0),
        ("two keys, stochastic rounding", "bf16:sr", "one_sign", 2, False, "product", 0),
        ("two keys, divided by l first, as kernels do", "bf16", "one_sign", 2, False, "output", 0),
        ("one key, divided by l first", "bf16", "one_sign", 1, False, "output", 0),
        ("one key, maximum moved, divided by l first", "bf16", "one_sign", 1, True, "output", 0),
        ("two keys, maximum moved, divided by l first", "bf16", "one_sign", 2, True, "output", 0),
        ("two keys, O with its residual", "bf16", "one_sign", 2, False, "residual", 0),
    )  # fmt: skip
    cases = []
    for label, number_format, inputs, ties, shifted, place, sign in wanted:
        for _, result in select(points, format=number_format, inputs=inputs, ties=ties,
                                shifted=shifted):  # fmt: skip
            low, high = {1: (BIAS_ULP, 1.0), -1: (-1.0, -BIAS_ULP), 0: (-BIAS_ULP, BIAS_ULP)}[sign]
            value = mean_interval(result[place]["away"])
            word = {1: "away from 0", -1: "towards 0", 0: f"within {BIAS_ULP:g}"}[sign]
            cases.append(Case(f"{label} ({word})", value, low, high, " ULP"))
    return cases


def _deltas(above: str, below: str, low: float, high: float) -> Callable[[Points], list[Case]]:
    def cases(points: Points) -> list[Case]:
        return [
            Case(
                f"{_where(cell)}, {gradient}",
                ratio(result[f"{above} {gradient}"]["relative"],
                      result[f"{below} {gradient}"]["relative"]),
                low, high, "x",
                f" (error {median_interval(result[f'{above} {gradient}']['relative']).middle:.2g})",
            )
            for cell, result in select(points, seqlen=max(cell.seqlen for cell, _ in points))
            for gradient in ("dq", "dk")
        ]  # fmt: skip

    return cases


def _where(cell: Cell) -> str:
    return f"{cell.format.upper()}, {title(cell.inputs)}, length {cell.seqlen}"


FORWARD_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "formats", f"{PAPER}, Fig. 3",
        "The difference between flash and baseline attention falls with every wider number format.",
        f"max |flash - baseline|, a format over the next narrower of BF16, FP16, FP32, FP64: "
        f"{range_text(*FALLS)} at every step.",
        emulated("3"), _falling, ("fig3",),
    ),
    Claim(
        "tenfold", f"{PAPER}, abstract and Fig. 4",
        "At BF16, flash attention deviates about ten times as much as baseline attention.",
        f"max |output - FP64|, flash over baseline: {range_text(*TENFOLD)}.",
        emulated("5"), _tenfold, ("fig5-ratio",),
    ),
    Claim(
        "more", f"{PAPER}, Fig. 4",
        "Flash attention is further from the FP64 value than baseline attention.",
        f"The same ratio in BF16 and FP16: {range_text(*MORE)}.",
        emulated("4"), _more, ("fig4",),
    ),
    Claim(
        "length-max", f"{PAPER}, Fig. 5a",
        "The largest difference between the two grows with the sequence length.",
        f"max |flash - baseline|, BF16, the longest over the shortest: {range_text(*GROWS)}.",
        emulated("5"), _growth("max"), ("fig5a",),
    ),
    Claim(
        "length-relative", f"{OURS}, on Fig. 5a",
        "So does the largest difference relative to the largest output.",
        f"max |flash - baseline| / max |baseline|: {range_text(*GROWS)}.",
        emulated("5"), _growth("max_relative"), ("fig5a",),
    ),
    Claim(
        "length-mean", f"{PAPER}, Fig. 5b",
        "Mean and spread of the difference grow with the sequence length.",
        "mean |flash - baseline|, and the standard deviation of flash - baseline, BF16: "
        f"{range_text(*GROWS)}.",
        emulated("5"), _growth("mean", "std"), ("fig5b",),
    ),
    Claim(
        "swapped", f"{PAPER}, Fig. 6a",
        "Swapping changes the difference from baseline: of the two block sizes, or of the loops.",
        "max |flash - baseline|, swapped over not: outside "
        f"{range_text(*SAME)}. With the loops exchanged a row's O, l and m stay on chip in FP32.",
        emulated("6a"), _swapped, ("fig6a",),
    ),
    Claim(
        "square", f"{PAPER}, Fig. 6b",
        "Square blocks have no significant effect.",
        "max |flash - baseline|, square over wide and over tall tiles of equal area: "
        f"{range_text(*SAME)}.",
        emulated("6b"), _square, ("fig6b",),
    ),
    Claim(
        "larger", f"{PAPER}, Fig. 6c",
        "Larger blocks lower the difference from baseline.",
        f"max |flash - baseline|, largest over smallest B_c: {range_text(*FALLS)}.",
        emulated("6c"), _larger, ("fig6c",),
    ),
    Claim(
        "rescale", f"{PAPER}, explanation of Fig. 6c as we read it",
        "The rescaling factors that tiling adds are where the deviation comes from.",
        "BF16 in the factors exp(m_before - m_after) alone: at least half of the whole deviation.",
        emulated("ablation"), functools.partial(_alone, "rescale"), ("ablation",),
    ),
    Claim(
        "tiling", f"{OURS}, on the same",
        "Rounding the factors and everything that is multiplied by them makes at least half.",
        "BF16 in the factors, their products with l, O and P V, and the sum of the latter two.",
        emulated("ablation"), functools.partial(_alone, TILING), ("ablation",),
    ),
    Claim(
        "bias", NEWER,
        "Rounding of P V is biased away from 0 where several P are 1 and V has one sign; with the "
        "controls, and what kernels do, stated.",
        f"Mean error away from 0, in gaps: beyond {BIAS_ULP:g} on the expected side where bias is "
        f"expected, within it where not.",
        emulated("bias"), _bias, ("bias",),
    ),
    Claim(
        "d-matters", OURS,
        "D = rowsum(dO * O) from the rounded O makes most of the error of dq and dk.",
        "Emulated kernels: relative error of dq and dk with D from the rounded O over that with D "
        f"from O before rounding: {range_text(*D_MATTERS)}.",
        emulated("backward"), _deltas("rounded", "exact", *D_MATTERS), ("backward",),
    ),
    Claim(
        "d-cure", OURS,
        "Keeping what rounding took from O in a second 16-bit tensor removes this error.",
        f"The same with D from O and its residual: {range_text(*D_CURED)}.",
        emulated("backward"), _deltas("residual", "exact", 0.0, D_CURED[1]), ("backward",),
    ),
    Claim(
        "d-cure-8", OURS,
        "A residual of 8 bits, in units of 1/256 gap at O, removes it as well.",
        f"The same with an 8-bit residual: {range_text(*D_CURED)}.",
        emulated("backward"), _deltas("residual8", "exact", 0.0, D_CURED[1]), ("backward",),
    ),
)  # fmt: skip
