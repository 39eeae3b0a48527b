"""Cases, intervals and verdicts: how data becomes a word."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..attentions.registry import LABELS
from ..forward.inputs import DISTRIBUTIONS
from ..forward.plan import forward_points
from ..numbers.intervals import Interval, median_interval, short

REPRODUCED = "holds"
CONDITIONAL = "holds only under stated conditions"
NOT_REPRODUCED = "does not hold"
UNDECIDED = "not decided by this data"
NOT_TESTED = "not tested"
QUICK = "no verdict: a quick study"
MARKS = {REPRODUCED: "yes", NOT_REPRODUCED: "no", CONDITIONAL: "some"}  # others: none
Range = tuple[float, float]
_NAMED = 4  # conditions that are named; the list of numbers has all


@dataclass(frozen=True)
class Case:
    """One number that a claim says something about.

    The claim holds where the whole interval lies in [low, high], and does not where none of it
    does; else the data do not decide.
    """

    name: str  # the condition that it was measured under
    value: Interval
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        return self.value.lies_in(self.low, self.high)

    def __str__(self) -> str:
        side = "above" if self.value.low > self.high else "below"
        word = {True: "", False: f" ({side} the range)", None: " (not decided)"}[self.holds]
        number = "no number" if math.isnan(self.value.middle) else f"{self.value}{self.unit}"
        return f"{self.name}: {number}{self.note}{word}"


@dataclass(frozen=True)
class Outcome:
    """What the data says of a claim."""

    verdict: str
    condition: str = ""
    cases: Sequence[Case] = ()

    @property
    def numbers(self) -> list[str]:
        return [str(case) for case in self.cases]


def title(name: str) -> str:
    """Returns what a distribution or an attention is called."""
    return {**LABELS, **DISTRIBUTIONS}.get(name, name)


Evidence = dict[str, Any]  # by the name of a study, as claims name them
KERNELS, ON_GPU, SINKS = (
    "real kernels", "real kernels on a GPU", "gradients on the workload sinks"
)  # fmt: skip
TRAINING, LANGUAGE = "training", "training of a language model"
MODEL = "gradients of a model"


def study_of(value: Mapping[str, Any]) -> str:
    """Returns the name of a study by its result: there are trainings of two kinds."""
    if value["kind"] == "gradients":
        return SINKS if value["configuration"]["model"].startswith("sinks") else MODEL
    workload = str(value["configuration"].get("workload", ""))
    return LANGUAGE if workload.startswith("language") else str(value["kind"])


def emulated(figure: str) -> str:
    """Returns the name of a figure of the study of emulated attention, as a study."""
    return f"emulated attention, {figure}"


def is_quick(configuration: Mapping[str, Any]) -> bool:
    """Returns whether a study of this configuration is too small for verdicts."""
    names = (configuration.get("workload", ""), configuration.get("model", ""))
    tiny = any(str(name).endswith("-tiny") for name in names)
    return bool(configuration.get("quick")) or tiny


def evidence_of(results: Mapping[str, dict[str, Any]]) -> Evidence:
    """Returns what claims are judged by, from what studies wrote, by `study_of`."""
    evidence: Evidence = {}
    if "forward" in results:
        for figure, points in forward_points(results["forward"]).items():
            evidence[emulated(figure)] = points
    evidence |= {name: results[name] for name in (TRAINING, LANGUAGE) if name in results}
    if "kernels" in results:
        evidence[KERNELS] = results["kernels"]
        if results["kernels"]["configuration"]["device"] == "cuda":
            evidence[ON_GPU] = results["kernels"]
    evidence |= {name: results[name]["whole"] for name in (SINKS, MODEL) if name in results}
    return evidence


@dataclass(frozen=True)
class Claim:
    """A claim."""

    key: str  # short name
    source: str  # where it is made
    text: str  # the claim, in our words
    how: str  # how it is tested
    study: str  # what it is tested by, see `evidence_of`
    cases: Callable[[Any], Iterable[Case]]  # of what that study found

    def judge(self, evidence: Evidence, quick: Collection[str] = ()) -> Outcome:
        """Returns what the data says; of the studies in `quick` the numbers only."""
        if self.study not in evidence:
            return Outcome(NOT_TESTED, f"the study of {self.study} was not run")
        outcome = decide(list(self.cases(evidence[self.study])))
        if self.study in quick and outcome.verdict != NOT_TESTED:
            return replace(outcome, verdict=QUICK, condition="")
        return outcome


def decide(cases: Sequence[Case]) -> Outcome:
    """Turns cases into an outcome.

    All hold: it holds. Some do and some do not: under the conditions that are their names. None
    does, and at least one is decided: it does not. Else the data do not decide.
    """
    if not cases:
        return Outcome(NOT_TESTED, "the studies hold no data on it")
    held = [case.name for case in cases if case.holds]
    failed = any(case.holds is False for case in cases)
    if len(held) == len(cases):
        return Outcome(REPRODUCED, cases=cases)
    if not held:
        return Outcome(NOT_REPRODUCED if failed else UNDECIDED, cases=cases)
    some = "; ".join(held[:_NAMED]) + ("; ..." if len(held) > _NAMED else "")
    count = f"holds in {len(held)} of {len(cases)} cases"
    if failed:
        return Outcome(CONDITIONAL, f"{count}: {some}", cases)
    return Outcome(UNDECIDED, f"{count} ({some}), and no other case is decided", cases)


def ratio(above: Sequence[float | None], below: Sequence[float | None]) -> Interval:
    """Returns the median over draws of above / below, draw by draw, with its interval."""
    pairs = zip(above, below, strict=True)
    return median_interval([a / b if a is not None and b else None for a, b in pairs])


def range_text(low: float, high: float) -> str:
    """Returns bounds in words."""
    if math.isinf(high):
        return f"at least {short(low)}"
    return f"at most {short(high)}" if math.isinf(low) else f"{short(low)} to {short(high)}"
