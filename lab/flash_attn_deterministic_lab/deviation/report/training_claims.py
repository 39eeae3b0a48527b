"""Claims that the training study tests, over paired seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..numbers.intervals import Interval, bootstrap, finite, mean_interval
from ..training.training_study import by_seed, minus, probe_changes
from .forward_claims import GROWS, OURS, PAPER
from .judging import TRAINING, Case, Claim, Range, range_text, ratio

LOWER = (2.0, 5.0)  # "2-5 times less significant than low-precision training"
NEARLY = (-0.01, 0.01)  # of the loss, in its own units
NOISE = ("nudge", "sdpa", "kernel", "paper", "explicit:p5", "explicit:p24", "ours",
         "ours-atomics", "sdpa-flash", "sdpa-cudnn", "explicit", "kernel+residual")  # fmt: skip

Training = dict[str, Any]
History = dict[str, list[float | None]]
Value = Callable[[History, str], float | None]


def _flash(training: Training) -> list[str]:
    """The runs with a flash attention that differ from base in nothing else."""
    names = ("paper", "kernel", "sdpa-flash", "ours", "ours-atomics", "sdpa-cudnn")
    return [name for name in names if by_seed(training, name)]


def _start(history: History, measure: str) -> float | None:
    return history[measure][0]


def _end(history: History, measure: str) -> float | None:
    return history[measure][-1]


def _added(history: History, measure: str) -> float | None:
    """A distance at the end less its value at step 0."""
    return minus(_end(history, measure), _start(history, measure))


def _over(
    training: Training, runs: tuple[str, str], measure: str, value: Value, wanted: Range,
    label: str, unit: str = "x", other: Value | None = None,
) -> Iterator[Case]:  # fmt: skip
    """A number of one run over that, or another one, of another run, seed by seed.

    Nothing where no seed has both.
    """
    left, right = (by_seed(training, name) for name in runs)
    seeds = [seed for seed in left if seed in right]
    if seeds:
        above = [value(left[seed], measure) for seed in seeds]
        below = [(other or value)(right[seed], measure) for seed in seeds]
        yield Case(label, ratio(above, below), *wanted, unit)


def _repeat(training: Training) -> Iterator[Case]:
    histories = by_seed(training, "repeat").values()
    if histories:
        # Bits are equal or not: the largest difference says it, and no interval.
        steps = [math.nan if x is None else x for h in histories for x in h["max_difference"]]
        worst = math.nan if any(map(math.isnan, steps)) else max(steps)
        yield Case(f"{len(histories)} seeds", Interval(worst, worst, worst), 0, 0)


def _init(training: Training) -> Iterator[Case]:
    for name in _flash(training):
        for measure in ("max_difference", "l2", "function"):
            label, unit = f"{name}, {measure.replace('_', ' ')}", "x of another init's"
            yield from _over(training, (name, "init"), measure, _end, (0.0, 0.99), label, unit)


def _grows(training: Training) -> Iterator[Case]:
    for name in _flash(training):
        histories = list(by_seed(training, name).values())
        steps = histories[0]["steps"]
        middle = len(steps) // 2
        for measure in ("max_difference", "l2"):
            ends, before = ([h[measure][place] for h in histories] for place in (-1, middle))
            where = f", step {steps[middle]} to {steps[-1]}"
            label = f"{name}, {measure.replace('_', ' ')}{where}"
            yield Case(label, ratio(ends, before), *GROWS, "x")


def _low_precision(training: Training) -> Iterator[Case]:
    for low, text in (("fp16", "FP16 against FP32"), ("fp32", "BF16 against FP32"),
                      ("pure_bf16", "BF16 weights against FP32 weights")):  # fmt: skip
        for name in _flash(training):
            for measure in ("wasserstein", "l2"):
                label = f"{text}, over {name}, {measure}"
                yield from _over(training, (low, name), measure, _added, LOWER, label)


def _variable(training: Training) -> Iterator[Case]:
    """Spread over seeds, over the mean, of the low-precision distance against flash's."""
    low = by_seed(training, "fp16")
    for name in _flash(training):
        flash = by_seed(training, name)
        pairs = [
            (low[seed]["wasserstein"][-1], flash[seed]["wasserstein"][-1])
            for seed in low.keys() & flash.keys()
        ]
        if len(pairs) >= 3 and not any(None in pair for pair in pairs):
            ends = torch.tensor(sorted(pairs), dtype=torch.float64)
            yield Case(f"FP16 over {name}", bootstrap(len(pairs), _spreads(ends)), 1.25, unit="x")


def _spreads(ends: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The relative spread of the first column over that of the second; ends is (seeds, 2)."""

    def ratios(seeds: torch.Tensor) -> torch.Tensor:
        spread = ends[seeds].std(1, correction=0) / ends[seeds].mean(1)
        return torch.where(spread[:, 1] > 0, spread[:, 0] / spread[:, 1], torch.nan)

    return ratios


def _null(training: Training) -> Iterator[Case]:
    """The Wasserstein distance over that of two fresh initialisations."""
    for name in _flash(training):
        runs, unit = (name, "init"), "x of two fresh models'"
        yield from _over(training, runs, "wasserstein", _end, (0.0, 1.0), name, unit, _start)


def _ranks(training: Training) -> Iterator[Case]:
    """Whether weights tell the sizes of noise apart: the noisiest over the quietest rounding."""
    runs = ("explicit:p5", "explicit:p24")
    for measure in ("l2", "function"):
        yield from _over(
            training, runs, measure, _added, (0.5, 2.0), f"{' over '.join(runs)}, {measure}"
        )


def _nudged(training: Training) -> Iterator[Case]:
    count = len(by_seed(training, "nudge").keys() & by_seed(training, "data").keys())
    runs, unit = ("nudge", "data"), "x of other data"
    yield from _over(training, runs, "l2", _end, (0.1, math.inf), f"{count} seeds", unit)


def _loss(training: Training) -> Iterator[Case]:
    changes = {name: probe_changes(training, name) for name in NOISE}
    shown = [name for name, change in changes.items() if change]
    seeds = finite(history["probe"] for history in by_seed(training, "base").values())
    for name in shown:
        note = ""
        if name == shown[-1] and len(seeds) > 1:
            spread = max(seeds) - min(seeds)
            note = f" (base itself spreads by {spread:.2g} over {len(seeds)} seeds)"
        yield Case(name, mean_interval(changes[name]), *NEARLY, note=note)


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
        TRAINING, _loss,
    ),
)  # fmt: skip
