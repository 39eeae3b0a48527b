"""Claims that trainings test, over paired seeds: Golden et al.'s figures 7 and 8, and ours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from scipy import stats

from ..numbers.intervals import Interval, finite, geometric_interval, mean_interval
from ..training.training_study import FP16, NUDGES, by_seed, probe_changes
from .forward_claims import MORE, OURS, PAPER
from .judging import LANGUAGE, TRAINING, Case, Claim, Range, range_text

LESS = (0.0, 0.9)
LOWER = (2.0, 5.0)  # "2-5 times less significant than low-precision training"
GROWING = (0.1, math.inf)  # powers of the number of steps
NO_FARTHER = (0.0, 1.25)
NO_STEEPER = (-math.inf, 0.25)  # powers of the number of steps
NEARLY = (-0.01, 0.01)  # of the loss, as a share of it
FLASH = ("paper", "kernel", "ours", "ours-atomics", "sdpa-flash", "sdpa-cudnn")

Training = dict[str, Any]
History = dict[str, list[float | None]]
Measure = Callable[[History, str], float | None]  # of a distance by its name


def _flash(training: Training, prefix: str = "") -> list[str]:
    """The runs with a flash attention that differ from what they are compared with in no more."""
    return [prefix + name for name in FLASH if by_seed(training, prefix + name)]


def _end(history: History, measure: str) -> float | None:
    return history[measure][-1]


def _points(history: History, measure: str) -> list[tuple[float, float]]:
    pairs = zip(history["steps"], history[measure], strict=True)
    return [(step, value) for step, value in pairs if step and value]


def _power(history: History, measure: str) -> float | None:
    """The power of the number of steps that a distance grows with: the slope of logarithms."""
    points = [(math.log(step), math.log(value)) for step, value in _points(history, measure)]
    return _slope(points)


def _rate(history: History, measure: str) -> float | None:
    """What a distance grows by in a step: the slope of a line through all points."""
    return _slope(_points(history, measure))


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    if len(points) < 3:
        return None
    steps, values = zip(*points, strict=True)
    line: Any = stats.linregress(steps, values)
    return float(line.slope)


def _ratios(
    training: Training, left: str, right: str, value: Measure, measure: str
) -> list[float | None]:
    """A number of one run over that of another, seed by seed, of the seeds that have both."""
    first, second = by_seed(training, left), by_seed(training, right)
    pairs = [
        (value(first[seed], measure), value(second[seed], measure))
        for seed in first
        if seed in second
    ]
    return [one / other if one is not None and other else None for one, other in pairs]


def _repeat(training: Training) -> Iterator[Case]:
    histories = by_seed(training, "repeat").values()
    if histories:
        # Bits are equal or not: the largest difference says it, and no interval.
        steps = [math.nan if x is None else x for h in histories for x in h["max_difference"]]
        worst = math.nan if any(map(math.isnan, steps)) else max(steps)
        yield Case(f"{len(histories)} seeds", Interval(worst, worst, worst), 0, 0)


def _init(training: Training) -> Iterator[Case]:
    for name in _flash(training):
        for measure in ("max_difference", "wasserstein"):
            if ratios := _ratios(training, name, "init", _end, measure):
                value = geometric_interval(ratios)
                yield Case(f"{name}, {measure.replace('_', ' ')}", value, *LESS, "x")


def _grows(training: Training) -> Iterator[Case]:
    for name in (*_flash(training), *_flash(training, FP16)):
        found = [_power(history, "wasserstein") for history in by_seed(training, name).values()]
        yield Case(f"{name}, power of the steps", mean_interval(found), *GROWING)


def _low_precision(measure: Measure, wanted: Range, training: Training) -> Iterator[Case]:
    for name in _flash(training, FP16):
        if ratios := _ratios(training, "fp16", name, measure, "wasserstein"):
            value = geometric_interval(ratios)
            yield Case(f"FP16 for FP32, over {name}", value, *wanted, "x")


def _nulls(training: Training) -> dict[str, list[History]]:
    """The histories of the runs of which one weight starts one BF16 gap higher, by seed."""
    found: dict[str, list[History]] = {}
    for name in NUDGES:
        for seed, history in by_seed(training, name).items():
            found.setdefault(seed, []).append(history)
    return found


def _null(training: Training) -> Iterator[Case]:
    nulls = _nulls(training)
    for name in _flash(training):
        histories = by_seed(training, name)
        ratios, powers = [], []
        for seed in histories.keys() & nulls.keys():
            own, ends = _end(histories[seed], "l2"), finite(_end(h, "l2") for h in nulls[seed])
            null = geometric_interval(ends).middle if ends else math.nan
            ratios.append(own / null if own and null > 0 else None)
            slopes = finite(_power(history, "l2") for history in nulls[seed])
            power = _power(histories[seed], "l2")
            if power is not None and slopes:
                power -= statistics.fmean(slopes)
            powers.append(power if slopes else None)
        if ratios:
            yield Case(f"{name}, L2 at the end", geometric_interval(ratios), *NO_FARTHER, "x")
            yield Case(f"{name}, power of the steps", mean_interval(powers), *NO_STEEPER,
                       unit=" more")  # fmt: skip


def _loss(training: Training) -> Iterator[Case]:
    base = finite(history["probe"] for history in by_seed(training, "base").values())
    for name, run in training["runs"].items():
        if (run["against"] == "base" and run["attention"]) or name in NUDGES:
            changes = mean_interval(probe_changes(training, name))
            spread = f" (seeds of base: {min(base):.3g} to {max(base):.3g})" if base else ""
            if by_seed(training, name):
                yield Case(name, changes, *NEARLY, note=spread)


def _claims(study: str, prefix: str, what: str) -> tuple[Claim, ...]:
    return (
        Claim(
            f"{prefix}repeat", OURS,
            f"{what}: a repeated training gives the same weights (control).",
            "Every weight difference at every step is 0.", study, _repeat,
        ),
        Claim(
            f"{prefix}init", f"{PAPER}, Fig. 7",
            f"{what}: flash attention changes weights less than another initialisation does.",
            "Largest difference and Wasserstein distance from base at the end, over another "
            f"initialisation's: {range_text(*LESS)}.", study, _init,
        ),
        Claim(
            f"{prefix}grows", f"{PAPER}, Fig. 7",
            f"{what}: the Wasserstein distance by flash attention grows over training.",
            "Slope of its logarithm over that of the steps: "
            f"{range_text(*GROWING)}.", study, _grows,
        ),
        Claim(
            f"{prefix}low-precision", f"{PAPER}, abstract and Fig. 8",
            f"{what}: flash attention's effect on weights is 2 to 5 times less than low "
            "precision's.",
            "Wasserstein distance at the end of FP16 from FP32 training, over that of FP16 "
            f"training with flash from one with explicit attention: {range_text(*LOWER)}.",
            study, partial(_low_precision, _end, LOWER),
        ),
        Claim(
            f"{prefix}steeper", f"{PAPER}, Fig. 8",
            f"{what}: the distance by low precision grows faster.",
            "Slope of a line through the same Wasserstein distances at all steps, FP16 for FP32 "
            f"over flash in FP16: {range_text(*MORE)}.",
            study, partial(_low_precision, _rate, MORE),
        ),
        Claim(
            f"{prefix}null", OURS,
            f"{what}: flash attention moves weights as one weight one BF16 gap higher does.",
            f"L2 distance at the end over the mean of {len(NUDGES)} such changes: "
            f"{range_text(*NO_FARTHER)}; power of the steps that it grows with, less theirs: "
            f"{range_text(*NO_STEEPER)}.", study, _null,
        ),
        Claim(
            f"{prefix}loss", OURS,
            f"{what}: the choice of attention changes held-out loss by less than 1 %.",
            "Held-out loss over that of base, less 1, paired by seed: "
            f"{range_text(*NEARLY)}.", study, _loss,
        ),
    )  # fmt: skip


TRAINING_CLAIMS = (
    *_claims(TRAINING, "", "Drawings"),
    *_claims(LANGUAGE, "language-", "Language"),
)
