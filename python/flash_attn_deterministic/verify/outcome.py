"""Statuses of sections and reports, and the exit status of the command."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from .shared import commands


@enum.unique
class Exit(enum.IntEnum):
    """Exit status of `flash-attn-deterministic verify`. 1 is any other error of the package."""

    PASSED = 0
    USAGE = 2  # argparse's too
    CONTRACT = 3
    ACCURACY = 4
    PERFORMANCE = 5
    ENVIRONMENT = 6
    REPORT = commands.UNWRITTEN
    INTERRUPTED = commands.INTERRUPTED


PASSED = "passed"
FAILED = "failed"
ERROR = "error"  # a check did not come to a result
NOT_APPLICABLE = "not-applicable"
NOT_RUN = "not-run"
INCOMPLETE = "incomplete"  # of a whole report only

# Title of each section, and what it makes the exit status where it fails: the first that failed
# decides. Without a sound environment nothing else can be what it should be.
SECTIONS = {
    "environment": ("Environment", Exit.ENVIRONMENT),
    "contract": ("Contract", Exit.CONTRACT),
    "accuracy": ("Accuracy against float64", Exit.ACCURACY),
    "forward": ("Time and memory of the forward", Exit.PERFORMANCE),
    "decode": ("Time of decode", Exit.PERFORMANCE),
    "backward": ("Time and memory of the backward", Exit.PERFORMANCE),
}


def combined(statuses: Iterable[str]) -> str:
    """Returns the status of a whole from those of its parts."""
    found = set(statuses)
    for status in (ERROR, FAILED, NOT_RUN):
        if status in found:
            return status
    return PASSED if PASSED in found or not found else NOT_APPLICABLE


def exit_status(sections: Iterable[Mapping[str, Any]], complete: bool) -> Exit:
    """Returns the exit status of a run, from its sections and whether it went to its end."""
    if not complete:
        return Exit.INTERRUPTED
    bad = {str(one["id"]) for one in sections if one["status"] not in (PASSED, NOT_APPLICABLE)}
    return next((status for name, (_, status) in SECTIONS.items() if name in bad), Exit.PASSED)
