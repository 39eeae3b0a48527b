"""Every claim, in the order of the report; those about the published training failure are here."""

from __future__ import annotations

from collections.abc import Iterator

from ..numbers.intervals import Interval
from .forward_claims import FORWARD_CLAIMS, NEWER, OURS
from .judging import MODEL, SINKS, Case, Claim, Range, range_text
from .kernel_claims import KERNEL_CLAIMS
from .training_claims import TRAINING_CLAIMS

# Of gradients on rows made for the failure (`training.sinks`).
COMMON = (0.5, 1.0)  # share of the squared error that is the same in every batch
NOT_COMMON = (-0.1, 0.1)
LARGE = (10.0, float("inf"))  # error over the gradient with exact attention
CURED = (0.0, 1.5)
# Of gradients of a model.
LITTLE = (0.0, 0.01)  # error over the spread of gradients between batches
KERNELS_OF_MODELS = ("ours", "ours-atomics", "sdpa-flash", "sdpa-cudnn")

_MEASURES = {  # what each is, and its unit
    "systematic": ("share in common to batches", " of the squared error in common"),
    "error": ("size of the error", "x exact gradient"),
    "noise": ("error over the spread between batches", " of the noise of a batch"),
}


def _claim(
    key: str, source: str, text: str, *wanted: tuple[str, str, Range], study: str = SINKS
) -> Claim:
    """A claim on gradients: ranges of measures of attentions."""

    def cases(whole: dict[str, dict[str, list[float]]]) -> Iterator[Case]:
        for name, measure, bounds in wanted:
            if name in whole:
                value = Interval.read(whole[name][measure])
                yield Case(name, value, *bounds, _MEASURES[measure][1])

    tests = {measure: bounds for _, measure, bounds in wanted}
    how = "; ".join(f"{_MEASURES[name][0]}: {range_text(*tests[name])}" for name in tests)
    of = "W_q" if study == SINKS else "all weights"
    return Claim(key, source, text, f"Gradient of {of}. {how}.", study, cases)


FAILURE_CLAIMS: tuple[Claim, ...] = (
    _claim(
        "failure-lines", NEWER,
        "With equal maxima and V and dO of one sign, attention in 16 bits after every line gives "
        "the gradient of W_q a large error of one direction.",
        ("torch-lines", "error", LARGE), ("torch-lines", "systematic", COMMON),
    ),
    _claim(
        "failure-remedy", NEWER,
        "Moving the maximum of such rows, the published remedy, removes that direction.",
        ("torch-lines-shifted", "systematic", NOT_COMMON),
    ),
    _claim(
        "failure-kernels", OURS,
        "Attention that rounds O once, as kernels do, has no such direction.",
        ("kernel", "systematic", NOT_COMMON), ("ours", "systematic", NOT_COMMON),
        ("sdpa", "systematic", NOT_COMMON), ("sdpa-flash", "systematic", NOT_COMMON),
        ("explicit", "systematic", NOT_COMMON),
    ),
    _claim(
        "failure-residual", OURS,
        "In kernels, D from O and its residual removes the error and its direction.",
        ("kernel+residual", "error", CURED), ("kernel+residual", "systematic", NOT_COMMON),
        ("ours+residual", "error", CURED), ("ours+residual", "systematic", NOT_COMMON),
    ),
)  # fmt: skip

MODEL_CLAIM = _claim(
    "model-noise", OURS,
    "In a trained model the error of kernels is less than 1 % of the noise of a batch, and "
    "batches have none of it in common.",
    *((name, measure, bounds) for name in KERNELS_OF_MODELS
      for measure, bounds in (("noise", LITTLE), ("systematic", NOT_COMMON))),
    study=MODEL,
)  # fmt: skip

CLAIMS: tuple[Claim, ...] = (
    *FORWARD_CLAIMS, *KERNEL_CLAIMS, *TRAINING_CLAIMS, MODEL_CLAIM, *FAILURE_CLAIMS
)  # fmt: skip
