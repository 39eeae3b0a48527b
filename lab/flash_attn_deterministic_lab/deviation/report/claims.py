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

_UNITS = {"systematic": " of the squared error in common", "error": "x exact gradient"}
_MEASURES = {"systematic": "share in common to batches", "error": "size of the error"}


def _claim(key: str, source: str, text: str, *wanted: tuple[str, str, Range]) -> Claim:
    def cases(whole: dict[str, dict[str, list[float]]]) -> Iterator[Case]:
        for name, measure, bounds in wanted:
            if name in whole:
                yield Case(name, Interval.read(whole[name][measure]), *bounds, _UNITS[measure])

    tests = {measure: bounds for _, measure, bounds in wanted}
    how = "; ".join(f"{_MEASURES[name]}: {range_text(*tests[name])}" for name in tests)
    return Claim(key, source, text, f"Gradient of W_q. {how}.", SINKS, cases)


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


KERNELS_OF_MODELS = ("ours", "ours-atomics", "sdpa-flash", "sdpa-cudnn")
LITTLE = (0.0, 0.01)  # of the spread of gradients between batches


def _of_model(whole: dict[str, dict[str, list[float]]]) -> Iterator[Case]:
    for name in KERNELS_OF_MODELS:
        if name in whole:
            noise, common = (Interval.read(whole[name][part]) for part in ("noise", "systematic"))
            yield Case(name, noise, *LITTLE, " of the noise of a batch")
            yield Case(f"{name}, common", common, *NOT_COMMON, _UNITS["systematic"])


MODEL_CLAIMS = (
    Claim(
        "model-noise", OURS,
        "In a trained model the error of kernels is less than 1 % of the noise of a batch, and "
        "batches have none of it in common.",
        "Error of the whole gradient over its spread between batches: "
        f"{range_text(*LITTLE)}; {_MEASURES['systematic']}: {range_text(*NOT_COMMON)}.",
        MODEL, _of_model,
    ),
)  # fmt: skip

CLAIMS: tuple[Claim, ...] = (
    *FORWARD_CLAIMS, *KERNEL_CLAIMS, *TRAINING_CLAIMS, *MODEL_CLAIMS, *FAILURE_CLAIMS
)  # fmt: skip
