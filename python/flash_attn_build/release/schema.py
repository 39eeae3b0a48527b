"""JSON that machines leave is held to a schema that names every field, since it is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from ..files import read_json


def problems(content: Any, schema: Path) -> list[str]:
    """Says where content is not as a schema has it; of many places the first three."""
    errors = Draft202012Validator(read_json(schema)).iter_errors(content)
    first = sorted(errors, key=lambda error: error.json_path)[:3]
    return [f"{error.json_path}: {error.message[:200]}" for error in first]
