"""The JSON form of a report."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1
NAMES = ("verification.json", "verification.md", "verification.html")


def canonical_digest(record: Mapping[str, Any]) -> str:
    """Returns the sha256 over a report without its digest, as canonical JSON.

    It shows that a file was changed by accident. It is no signature: who changes a report can
    compute it anew; the attestation of the build is what protects against that.
    """
    rest = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have by None, throughout."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def json_text(record: Mapping[str, Any]) -> str:
    """Returns a report as the text of its JSON file."""
    return json.dumps(record, indent=1, allow_nan=False) + "\n"
