"""Claims that the training study tests, over paired seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..numbers.intervals import Interval, bootstrap, finite, mean_interval
from ..training.training_study import by_seed, probe_changes
from .forward_claims import GROWS, OURS, PAPER
from .judging import TRAINING, Case, Claim, range_text, ratio

LOWER = (2.0, 5.0)  # "2-5 times less significant than low-precision training"
NEARLY = (-0.01, 0.01)  # of the loss, in its own units
NOISE = ("nudge", "sdpa", "kernel", "paper", "explicit:p5", "explicit:p24", "ours-atomics",
         "sdpa-flash", "sdpa-cudnn", "explicit", "kernel+residual")  # fmt: skip

Training = dict[str, Any]
History = dict[str, Any]


def _flash(training: Training) -> list[str]:
    """The runs with a flash attention that differ from base in nothing else."""
    names = ("paper", "kernel", "sdpa-flash", "ours", "ours-atomics", "sdpa-cudnn")
    return [name for name in names if by_seed(training, name)]


def _end(measure: str) -> Callable[[History], float | None]:
    return lambda history: history[measure][-1]


def _added(measure: str) -> Callable[[History], float | None]:
    """A distance at the end less its value at step 0."""

    def added(history: History) -> float | None:
        last, first = history[measure][-1], history[measure][0]
        return None if last is None or first is None else last - first

    return added


def _over(
    training: Training,
    above: str,
    below: str,
    value: Callable[[History], float | None],
    other: Callable[[History], float | None] | None = None,
) -> Interval:
    """A number of one run over that, or another one, of another run, seed by seed."""
    left, right = by_seed(training, above), by_seed(training, below)
    seeds = [seed for seed in left if seed in right]
    other = other or value
    return ratio([value(left[seed]) for seed in seeds], [other(right[seed]) for seed in seeds])


def _repeat(training: Training) -> list[Case]:
    ends = [max(history["max_difference"]) for history in by_seed(training, "repeat").values()]
    return [Case(f"{len(ends)} seeds", mean_interval(ends), 0, 0)] if ends else []


def _init(training: Training) -> list[Case]:
    if not by_seed(training, "init"):
        return []
    return [
        Case(
            f"{name}, {measure.replace('_', ' ')}",
            _over(training, name, "init", _end(measure)), 0.0, 0.99, "x of another init's",
        )
        for name in _flash(training)
        for measure in ("max_difference", "l2", "function")
    ]  # fmt: skip


def _grows(training: Training) -> list[Case]:
    cases = []
    for name in _flash(training):
        histories = list(by_seed(training, name).values())
        steps = histories[0]["steps"]
        middle = len(steps) // 2
        for measure in ("max_difference", "l2"):
            ends, before = ([h[measure][place] for h in histories] for place in (-1, middle))
            where = f", step {steps[middle]} to {steps[-1]}"
            label = f"{name}, {measure.replace('_', ' ')}{where}"
            cases.append(Case(label, ratio(ends, before), *GROWS, unit="x"))
    return cases


def _low_precision(training: Training) -> list[Case]:
    cases = []
    for low, label in (("fp16", "FP16 against FP32"), ("fp32", "BF16 against FP32"),
                       ("pure_bf16", "BF16 weights against FP32 weights")):  # fmt: skip
        if not by_seed(training, low):
            continue
        for name in _flash(training):
            for measure in ("wasserstein", "l2"):
                value = _over(training, low, name, _added(measure))
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
        found = bootstrap(len(pairs), functools.partial(_spreads, ends))
        cases.append(Case(f"FP16 over {name}", found, 1.25, unit="x"))
    return cases


def _spreads(ends: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The relative spread of the first column over that of the second; ends is (seeds, 2)."""
    drawn = ends[seeds]
    spread = drawn.std(1, correction=0) / drawn.mean(1)
    return torch.where(spread[:, 1] > 0, spread[:, 0] / spread[:, 1], torch.nan)


def _null(training: Training) -> list[Case]:
    """The Wasserstein distance over that of two fresh initialisations."""
    if not by_seed(training, "init"):
        return []
    end, fresh = _end("wasserstein"), lambda history: history["wasserstein"][0]
    return [
        Case(name, _over(training, name, "init", end, fresh), 0.0, 1.0, "x of two fresh models'")
        for name in _flash(training)
    ]


def _ranks(training: Training) -> list[Case]:
    """Whether weights tell the sizes of noise apart: the noisiest over the quietest rounding."""
    if not (by_seed(training, "explicit:p5") and by_seed(training, "explicit:p24")):
        return []
    return [
        Case(
            f"explicit:p5 over explicit:p24, {measure}",
            _over(training, "explicit:p5", "explicit:p24", _added(measure)), 0.5, 2.0, "x",
        )
        for measure in ("l2", "function")
    ]  # fmt: skip


def _nudged(training: Training) -> list[Case]:
    seeds = by_seed(training, "nudge").keys() & by_seed(training, "data").keys()
    if not seeds:
        return []
    value = _over(training, "nudge", "data", _end("l2"))
    return [Case(f"{len(seeds)} seeds", value, 0.1, unit="x of other data")]


def _loss(training: Training) -> list[Case]:
    cases = []
    for name in NOISE:
        change = probe_changes(training, name)
        if change:
            cases.append(Case(name, mean_interval(change), *NEARLY))
    seeds = finite(history["probe"] for history in by_seed(training, "base").values())
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
        TRAINING, _repeat, ("fig7",),
    ),
    Claim(
        "init", f"{PAPER}, Fig. 7",
        "Weights change less by flash attention than by another initialisation.",
        "Distance from base at the end, over that of another initialisation: below 1.",
        TRAINING, _init, ("fig7",),
    ),
    Claim(
        "grows", f"{PAPER}, Fig. 7",
        "The weight difference grows over training.",
        f"At the end over the middle of the points: {range_text(*GROWS)}.",
        TRAINING, _grows, ("fig7",),
    ),
    Claim(
        "low-precision", f"{PAPER}, abstract and Fig. 8",
        "Flash attention's effect on weights is 2 to 5 times less than low-precision training's.",
        "Distance by the number format over that by flash, less their values at step 0: "
        f"{range_text(*LOWER)}. The paper's comparison is FP16 against FP32.",
        TRAINING, _low_precision, ("fig8",),
    ),
    Claim(
        "variable", f"{PAPER}, Fig. 8",
        "The distance by low precision is more variable than that by flash.",
        "Relative spread over seeds of the Wasserstein distance at the end: at least 1.25 times.",
        TRAINING, _variable, ("fig8",),
    ),
    Claim(
        "null", f"{OURS}, on Fig. 8",
        "The Wasserstein distance by flash is less than that of two untrained models.",
        "Distance at the end over that of two initialisations at step 0: below 1. That null "
        "shrinks with the width of the model, so ratios to it say nothing across models.",
        TRAINING, _null, ("fig8",),
    ),
    Claim(
        "ranks", OURS,
        "Distances of weights hardly tell large rounding errors from small ones.",
        "Explicit attention with 5 bits over the same with 24 bits, distance from base (8 bits): "
        f"{range_text(0.5, 2.0)}.",
        TRAINING, _ranks, ("noise",),
    ),
    Claim(
        "nudge", "Summers and Dinneen 2021, arXiv 2103.04514",
        "In so few steps, a change of one bit in one weight moves the model as other noise does.",
        "L2 distance by one weight one FP32 gap higher, over that by other data: at least 0.1. "
        "Their claim is of trainings to the end.",
        TRAINING, _nudged, ("fig7",),
    ),
    Claim(
        "loss", OURS,
        "The choice of attention moves the loss of held-out batches by at most 0.01.",
        "Loss at the end less that of the run it is compared with, paired by seed: within "
        f"{range_text(*NEARLY)}.",
        TRAINING, _loss, ("training-loss",),
    ),
)  # fmt: skip
