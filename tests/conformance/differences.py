"""The listed differences from upstream, and which of them a failure is."""

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


def load(path: Path = FILE) -> list[Difference]:
    """Reads the list.

    Raises:
        ValueError: an entry lacks a reason.
    """
    entries = [Difference(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    for entry in entries:
        if not entry.reason.strip():
            raise ValueError(f"{path}: {entry.test}: expected a reason, got none")
    return entries
