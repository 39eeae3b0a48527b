"""Claims that the study of real kernels tests."""

from __future__ import annotations

from typing import Any

from ..kernels.agreement import CONTROL
from ..numbers.intervals import Interval, median_interval
from .forward_claims import MORE, OURS, PAPER, TENFOLD
from .judging import KERNELS, ON_GPU, Case, Claim, range_text, ratio
from .names import attention_name, title

NO_MORE = (0.0, 1.1)
BEATS = (0.0, 0.5)  # share of unequal elements over that of the control
FLASH = ("ours", "sdpa-flash", "sdpa-cudnn")

_SAME_POINT = ("format", "inputs", "seqlen", "head_dim")
Kernels = dict[str, Any]


def _over_explicit(
    points: list[dict[str, Any]], metric: str, wanted: tuple[float, float], gradient: str = "",
    names: tuple[str, ...] = FLASH,
) -> list[Case]:  # fmt: skip
    """Each flash kernel over explicit attention, over all lengths of a kind of inputs."""
    shown = [p for p in points if p.get("gradient", "") == gradient]
    explicit = {
        tuple(p[key] for key in _SAME_POINT): p["result"][metric]
        for p in shown
        if p["backend"] == "explicit"
    }
    cases: dict[str, list[Interval]] = {}
    for point in shown:
        if point["backend"] not in names:
            continue
        where = tuple(point[key] for key in _SAME_POINT)
        label = f"{attention_name(point['backend'])}, {point['format'].upper()}, "
        label += title(point["inputs"]) + (f", {gradient}" if gradient else "")
        cases.setdefault(label, []).append(ratio(point["result"][metric], explicit[where]))
    return [
        Case(
            label,
            Interval(min(i.low for i in found), median_interval([i.middle for i in found]).middle,
                     max(i.high for i in found)),
            *wanted, "x, all lengths",
        )
        for label, found in cases.items()
    ]  # fmt: skip


def _forward(kernels: Kernels) -> list[Case]:
    points = [p for p in kernels["forward"] if p["format"] == "bf16"]
    return _over_explicit(points, "max", TENFOLD)


def _backward(kernels: Kernels) -> list[Case]:
    return [
        case
        for gradient in ("dq", "dk", "dv")
        for case in _over_explicit(kernels["backward"], "relative", MORE, gradient)
    ]


def _residual(kernels: Kernels) -> list[Case]:
    return [
        case
        for gradient in ("dq", "dk")
        for case in _over_explicit(
            kernels["backward"], "relative", NO_MORE, gradient, ("ours+residual",)
        )
    ]


def _agreement(kernels: Kernels) -> list[Case]:
    controls = {
        tuple(p[key] for key in _SAME_POINT): 1 - p["equal"]
        for p in kernels["agreement"]
        if p["preset"] == CONTROL
    }
    cases = []
    for point in kernels["agreement"]:
        if point["preset"] == CONTROL:
            continue
        other = controls[tuple(point[key] for key in _SAME_POINT)]
        share = (1 - point["equal"]) / other if other else float("nan")
        label = f"{point['preset']}, {point['format'].upper()}, d = {point['head_dim']}, "
        text = f" of the control's {other:.2%} ({point['equal']:.2%} equal)"
        cases.append(
            Case(label + title(point["inputs"]), Interval(share, share, share), *BEATS, "x", text)
        )
    return cases


def _repeats(kernels: Kernels) -> list[Case]:
    cases = []
    for output in ("out", "dq", "dk", "dv"):
        found = [
            p for p in kernels["run_to_run"] if (p["backend"], p["output"]) == ("ours", output)
        ]
        if found:
            differ = sum(not p["same_bits"] for p in found)
            text = f" of {len(found)} calls differ in {found[0]['repeats']} repeats"
            cases.append(Case(output, Interval(differ, differ, differ), 0, 0, text))
    return cases


KERNEL_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "real", f"{PAPER}, abstract, on real kernels",
        "Real flash kernels deviate about ten times as much as explicit attention at BF16.",
        f"max |output - FP64| over that of explicit attention: {range_text(*TENFOLD)}.",
        ON_GPU, _forward, ("kernels-forward",),
    ),
    Claim(
        "real-backward", OURS,
        "Gradients of real flash kernels are further from FP64 than explicit attention's.",
        "Relative error of dq, dk and dv over that of explicit attention in the format: "
        f"{range_text(*MORE)}, from the least to the largest length.",
        ON_GPU, _backward, ("kernels-backward",),
    ),
    Claim(
        "real-residual", OURS,
        "With keep_residual, dq and dk of this project's kernels are as near to FP64 as explicit "
        "attention's.",
        f"The same for these kernels: {range_text(*NO_MORE)}.",
        ON_GPU, _residual, ("kernels-backward",),
    ),
    Claim(
        "agreement", OURS,
        "The reference with P in 16 bits is what this project's CUDA kernels compute.",
        "Share of elements of other bits, over that of a control with P in FP32: "
        f"{range_text(*BEATS)}. Elsewhere the share tells the two models apart too little.",
        ON_GPU, _agreement,
    ),
    Claim(
        "noise", OURS,
        "This project's forward and backward have no run-to-run variance.",
        "The same call again and again: equal bits.",
        KERNELS, _repeats,
    ),
)  # fmt: skip
