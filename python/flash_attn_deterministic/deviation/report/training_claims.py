"""Claims that the training study tests, over paired seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..numbers.intervals import Interval, interval_of, mean_interval, median_interval
from ..training.training_study import by_seed
from .forward_claims import GROWS, OURS, PAPER
from .judging import Case, Claim, Evidence, Outcome, decide, range_text, untested

LOWER = (2.0, 5.0)  # "2-5 times less significant than low-precision training"
NEARLY = (-0.01, 0.01)  # of the loss, in its own units
NOISE = ("nudge", "sdpa", "kernel", "paper", "explicit:p5", "explicit:p24", "ours-atomics",
         "sdpa-flash", "sdpa-cudnn", "explicit", "kernel+residual")  # fmt: skip

Training = dict[str, Any]


def _judge(cases: Callable[[Training], list[Case]]) -> Callable[[Evidence], Outcome]:
    def judge(evidence: Evidence) -> Outcome:
        return (
            untested("training") if evidence.training is None else decide(cases(evidence.training))
        )

    return judge


def _flash(training: Training) -> list[str]:
    """The runs with a flash attention that differ from base in nothing else."""
    names = ("paper", "kernel", "sdpa-flash", "ours", "ours-atomics", "sdpa-cudnn")
    return [name for name in names if by_seed(training, name)]


def _added(history: dict[str, Any], measure: str, place: int = -1) -> float | None:
    """A distance less its value at step 0."""
    values = history[measure]
    if values[place] is None or values[0] is None:
        return None
    return float(values[place] - values[0])


def _over(training: Training, above: str, below: str, measure: str, place: int = -1) -> Interval:
    """One run's distance over another's, less their values at step 0, seed by seed."""
    left, right = by_seed(training, above), by_seed(training, below)
    found = []
    for seed in left.keys() & right.keys():
        a, b = _added(left[seed], measure, place), _added(right[seed], measure, place)
        found.append(a / b if a is not None and b else None)
    return median_interval(found)


def _repeat(training: Training) -> list[Case]:
    ends = [max(history["max_difference"]) for history in by_seed(training, "repeat").values()]
    return [Case(f"{len(ends)} seeds", mean_interval(ends), 0, 0)] if ends else []


def _init(training: Training) -> list[Case]:
    cases = []
    init = by_seed(training, "init")
    for name in _flash(training):
        for measure in ("max_difference", "l2", "function"):
            found = by_seed(training, name)
            pairs = [
                found[seed][measure][-1] / init[seed][measure][-1]
                for seed in found.keys() & init.keys()
            ]
            label = f"{name}, {measure.replace('_', ' ')}"
            cases.append(Case(label, median_interval(pairs), 0.0, 0.99, "x of another init's"))
    return cases if init else []


def _grows(training: Training) -> list[Case]:
    cases = []
    for name in _flash(training):
        for measure in ("max_difference", "l2"):
            found = []
            steps: list[int] = []
            for history in by_seed(training, name).values():
                steps = history["steps"]
                middle = len(steps) // 2
                found.append(history[measure][-1] / (history[measure][middle] or float("nan")))
            where = f", step {steps[len(steps) // 2]} to {steps[-1]}"
            label = f"{name}, {measure.replace('_', ' ')}{where}"
            cases.append(Case(label, median_interval(found), *GROWS, unit="x"))
    return cases


def _low_precision(training: Training) -> list[Case]:
    cases = []
    for low, label in (("fp16", "FP16 against FP32"), ("fp32", "BF16 against FP32"),
                       ("pure_bf16", "BF16 weights against FP32 weights")):  # fmt: skip
        if not by_seed(training, low):
            continue
        for name in _flash(training):
            for measure in ("wasserstein", "l2"):
                value = _over(training, low, name, measure)
                cases.append(Case(f"{label}, over {name}, {measure}", value, *LOWER, unit="x"))
    return cases


def _variable(training: Training) -> list[Case]:
    """Spread over seeds, over the mean, of the low-precision distance against flash's."""
    low = by_seed(training, "fp16")
    cases = []
    for name in _flash(training):
        flash = by_seed(training, name)
        pairs = [
            (low[seed]["wasserstein"][-1], flash[seed]["wasserstein"][-1])
            for seed in low.keys() & flash.keys()
        ]
        if len(pairs) < 3 or any(None in pair for pair in pairs):
            continue
        ends = torch.tensor(sorted(pairs), dtype=torch.float64)
        found = interval_of(len(pairs), functools.partial(_spreads, ends))
        cases.append(Case(f"FP16 over {name}", found, 1.25, unit="x"))
    return cases


def _spreads(ends: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The relative spread of the first column over that of the second; ends is (seeds, 2)."""
    drawn = ends[seeds]
    spread = drawn.std(1, correction=0) / drawn.mean(1)
    return torch.where(spread[:, 1] > 0, spread[:, 0] / spread[:, 1], torch.nan)


def _null(training: Training) -> list[Case]:
    """The Wasserstein distance over that of two fresh initialisations."""
    init = by_seed(training, "init")
    cases = []
    for name in _flash(training):
        found = by_seed(training, name)
        pairs = [
            found[seed]["wasserstein"][-1] / init[seed]["wasserstein"][0]
            for seed in found.keys() & init.keys()
        ]
        cases.append(Case(name, median_interval(pairs), 0.0, 1.0, "x of two fresh models'"))
    return cases if init else []


def _ranks(training: Training) -> list[Case]:
    """Whether weights tell the sizes of noise apart: the noisiest over the quietest rounding."""
    if not (by_seed(training, "explicit:p5") and by_seed(training, "explicit:p24")):
        return []
    return [
        Case(
            f"explicit:p5 over explicit:p24, {measure}",
            _over(training, "explicit:p5", "explicit:p24", measure), 0.5, 2.0, "x",
        )
        for measure in ("l2", "function")
    ]  # fmt: skip


def _nudged(training: Training) -> list[Case]:
    found, data = by_seed(training, "nudge"), by_seed(training, "data")
    ends = [found[s]["l2"][-1] / data[s]["l2"][-1] for s in found.keys() & data.keys()]
    if not ends:
        return []
    return [Case(f"{len(ends)} seeds", median_interval(ends), 0.1, float("inf"), "x of other data")]


def _loss(training: Training) -> list[Case]:
    cases = []
    for name in NOISE:
        found = by_seed(training, name)
        against = training["runs"].get(name, {}).get("against", "")
        change = [
            history["probe"] - training["seeds"][seed][against]["probe"]
            for seed, history in found.items()
        ]
        if change:
            cases.append(Case(name, mean_interval(change), *NEARLY))
    seeds = [history["probe"] for history in by_seed(training, "base").values()]
    if cases and len(seeds) > 1:
        spread = max(seeds) - min(seeds)
        last = cases.pop()
        note = f" (base itself spreads by {spread:.2g} over {len(seeds)} seeds)"
        cases.append(Case(last.name, last.value, last.low, last.high, last.unit, note))
    return cases


TRAINING_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "repeat", OURS,
        "A repeated training gives the same weights (control).",
        "Every weight difference at every step is 0.",
        _judge(_repeat), ("fig7",),
    ),
    Claim(
        "init", f"{PAPER}, Fig. 7",
        "Weights change less by flash attention than by another initialisation.",
        "Distance from base at the end, over that of another initialisation: below 1.",
        _judge(_init), ("fig7",),
    ),
    Claim(
        "grows", f"{PAPER}, Fig. 7",
        "The weight difference grows over training.",
        f"At the end over the middle of the points: {range_text(*GROWS)}.",
        _judge(_grows), ("fig7",),
    ),
    Claim(
        "low-precision", f"{PAPER}, abstract and Fig. 8",
        "Flash attention's effect on weights is 2 to 5 times less than low-precision training's.",
        "Distance by the number format over that by flash, less their values at step 0: "
        f"{range_text(*LOWER)}. The paper's comparison is FP16 against FP32.",
        _judge(_low_precision), ("fig8",),
    ),
    Claim(
        "variable", f"{PAPER}, Fig. 8",
        "The distance by low precision is more variable than that by flash.",
        "Relative spread over seeds of the Wasserstein distance at the end: at least 1.25 times.",
        _judge(_variable), ("fig8",),
    ),
    Claim(
        "null", f"{OURS}, on Fig. 8",
        "The Wasserstein distance by flash is less than that of two untrained models.",
        "Distance at the end over that of two initialisations at step 0: below 1. That null "
        "shrinks with the width of the model, so ratios to it say nothing across models.",
        _judge(_null), ("fig8",),
    ),
    Claim(
        "ranks", OURS,
        "Distances of weights hardly tell large rounding errors from small ones.",
        "Explicit attention with 5 bits over the same with 24 bits, distance from base (8 bits): "
        f"{range_text(0.5, 2.0)}.",
        _judge(_ranks), ("noise",),
    ),
    Claim(
        "nudge", "Summers and Dinneen 2021, arXiv 2103.04514",
        "In so few steps, a change of one bit in one weight moves the model as other noise does.",
        "L2 distance by one weight one FP32 gap higher, over that by other data: at least 0.1. "
        "Their claim is of trainings to the end.",
        _judge(_nudged), ("fig7",),
    ),
    Claim(
        "loss", OURS,
        "The choice of attention moves the loss of held-out batches by at most 0.01.",
        "Loss at the end less that of the run it is compared with, paired by seed: within "
        f"{range_text(*NEARLY)}.",
        _judge(_loss), ("training-loss",),
    ),
)  # fmt: skip
