"""The listed differences from upstream: failures, and helpers of the tests that do not apply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("differences.json")


@dataclass(frozen=True)
class Difference:
    """Failures that are expected.

    Args:
        test: name of the test function.
        when: parameters and their values, written as in the id of a case; a case must have all.
        message: a regular expression found in the text of the exception.
        reason: why this package differs, in a sentence.
    """

    test: str
    when: Mapping[str, str]
    message: str
    reason: str

    def covers(self, test: str, parameters: Mapping[str, Any], message: str) -> bool:
        """Returns whether a failure is this difference."""
        written = {name: str(value).removeprefix("torch.") for name, value in parameters.items()}
        return (
            test == self.test
            and all(written.get(name) == value for name, value in self.when.items())
            and re.search(self.message, message) is not None
        )


@dataclass(frozen=True)
class Helper:
    """A function of the test file that would undo what only flash_attn does.

    In its place stands one that returns its first argument.

    Args:
        name: of the function.
        reason: why this package differs, in a sentence.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Differences:
    """The whole list.

    Args:
        failures: that are expected.
        helpers: that are passed over.
    """

    failures: tuple[Difference, ...] = ()
    helpers: tuple[Helper, ...] = ()


def load(path: Path = FILE) -> Differences:
    """Reads the list.

    Raises:
        ValueError: an entry lacks a reason.
    """
    listed = json.loads(path.read_text(encoding="utf-8"))
    failures = tuple(Difference(**entry) for entry in listed["failures"])
    helpers = tuple(Helper(**entry) for entry in listed["helpers"])
    reasons = {f.test: f.reason for f in failures} | {h.name: h.reason for h in helpers}
    for name, reason in reasons.items():
        if not reason.strip():
            raise ValueError(f"{path}: {name}: expected a reason, got none")
    return Differences(failures, helpers)
