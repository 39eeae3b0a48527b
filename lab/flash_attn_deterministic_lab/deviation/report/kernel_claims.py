"""Claims that the study of real kernels tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..numbers.intervals import Interval, median_interval
from .forward_claims import MORE, OURS, PAPER, TENFOLD
from .judging import KERNELS, ON_GPU, Case, Claim, Range, range_text, ratio, title

NO_MORE = (0.0, 1.1)
FLASH = ("ours", "sdpa-flash", "sdpa-cudnn")

_SAME_POINT = ("format", "inputs", "seqlen", "head_dim")
Kernels = dict[str, Any]


def _place(point: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(point[key] for key in _SAME_POINT)


def _over_explicit(
    part: str, metric: str, wanted: Range, kernels: Kernels, *, gradients: Sequence[str] = ("",),
    names: Sequence[str] = FLASH, formats: Sequence[str] = ("bf16", "fp16"),
) -> Iterator[Case]:  # fmt: skip
    """Each flash kernel over explicit attention, over all lengths of a kind of inputs."""
    for gradient in gradients:
        shown = [p for p in kernels[part]
                 if p.get("gradient", "") == gradient and p["format"] in formats]  # fmt: skip
        explicit = {_place(p): p["result"] for p in shown if p["backend"] == "explicit"}
        found: dict[str, list[Interval]] = {}
        for p in shown:
            if p["backend"] in names and _place(p) in explicit:
                label = f"{title(p['backend'])}, {p['format'].upper()}, "
                label += title(p["inputs"]) + (f", {gradient}" if gradient else "")
                over = ratio(p["result"][metric], explicit[_place(p)][metric])
                found.setdefault(label, []).append(over)
        for label, all_lengths in found.items():
            low, middle, high = zip(*(i.listed() for i in all_lengths), strict=True)
            value = Interval(min(low), median_interval(middle).middle, max(high))
            yield Case(label, value, *wanted, "x, all lengths")


def _repeats(kernels: Kernels) -> Iterator[Case]:
    for output in ("out", "dq", "dk", "dv"):
        runs = kernels["run_to_run"]
        found = [p for p in runs if (p["backend"], p["output"]) == ("ours", output)]
        if found:
            differ = sum(not p["same_bits"] for p in found)
            text = f" of {len(found)} calls differ in {found[0]['repeats']} repeats"
            yield Case(output, Interval(differ, differ, differ), 0, 0, text)


KERNEL_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "real", f"{PAPER}, abstract, on real kernels",
        "Real flash kernels deviate about ten times as much as explicit attention at BF16.",
        f"max |output - FP64| over that of explicit attention: {range_text(*TENFOLD)}.",
        ON_GPU, partial(_over_explicit, "forward", "max", TENFOLD, formats=("bf16",)),
    ),
    Claim(
        "real-backward", OURS,
        "Gradients of real flash kernels are further from FP64 than explicit attention's.",
        "Relative error of dq, dk and dv over that of explicit attention in the format: "
        f"{range_text(*MORE)}, from the least to the largest length.",
        ON_GPU,
        partial(_over_explicit, "backward", "relative", MORE, gradients=("dq", "dk", "dv")),
    ),
    Claim(
        "real-residual", OURS,
        "With keep_residual, dq and dk of this project's kernels are as near to FP64 as explicit "
        "attention's.",
        f"The same for these kernels: {range_text(*NO_MORE)}.",
        ON_GPU,
        partial(_over_explicit, "backward", "relative", NO_MORE, gradients=("dq", "dk"),
                names=("ours+residual",)),
    ),
    Claim(
        "noise", OURS,
        "This project's forward and backward have no run-to-run variance.",
        "The same call again and again: equal bits.",
        KERNELS, _repeats,
    ),
)  # fmt: skip
