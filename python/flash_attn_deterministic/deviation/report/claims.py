"""Every claim, in the order of the report."""

from __future__ import annotations

from collections.abc import Collection

from .failure_claims import FAILURE_CLAIMS
from .forward_claims import FORWARD_CLAIMS
from .judging import Claim, Evidence, Outcome
from .kernel_claims import KERNEL_CLAIMS
from .training_claims import TRAINING_CLAIMS

CLAIMS: tuple[Claim, ...] = (
    *FORWARD_CLAIMS,
    *KERNEL_CLAIMS,
    *TRAINING_CLAIMS,
    *FAILURE_CLAIMS,
)


def judge_all(evidence: Evidence, quick: Collection[str] = ()) -> list[tuple[Claim, Outcome]]:
    """Judges every claim; those of the studies in `quick` get numbers, and no verdict.

    Nothing here is typed in but claims and ranges: numbers and verdicts come from the studies.
    """
    return [(claim, claim.judge(evidence, quick)) for claim in CLAIMS]
