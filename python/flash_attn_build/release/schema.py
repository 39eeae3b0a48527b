"""JSON that machines leave is held to a schema that names every field, since it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator


def problems(content: Any, schema: Path) -> list[str]:
    """Says where content is not as a schema has it; of many places the first three."""
    # Python's $ matches before a line's end, too.
    text = schema.read_text(encoding="utf-8").replace('$"', r'\\Z"')
    errors = Draft202012Validator(json.loads(text)).iter_errors(content)
    first = sorted(errors, key=lambda error: error.json_path)[:3]
    return [f"{error.json_path}: {error.message[:200]}" for error in first]
