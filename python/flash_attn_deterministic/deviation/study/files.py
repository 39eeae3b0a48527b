"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from .environment import environment

SCHEMA = 2  # of the fields of every result


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path, which at the end is moved to `path`; after an error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Any, indent: int | None = None, digits: int = 8) -> None:
    """Writes JSON; numbers to so many digits, NaN and infinities, which JSON lacks, as null."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(_plain(value, digits), indent=indent, sort_keys=True, separators=separators)
    write_text(path, text + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        ArgumentError: the file is missing or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: expected a JSON file of a study, got {error}") from error


def new_result(kind: str, configuration: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Returns what the result of a study begins with."""
    found = {"kind": kind, "schema": SCHEMA, "configuration": configuration}
    return {**found, "environment": environment(device)}


def write_result(folder: Path, value: dict[str, Any], digits: int = 4) -> None:
    """Writes the result of a study, a file of the name that it gives itself."""
    write_json(folder / f"{value['kind']}.json", value, digits=digits)


def read_result(folder: Path, kind: str) -> dict[str, Any]:
    """Reads what `write_result` wrote.

    Raises:
        ArgumentError: the file is missing, no JSON, no result of this study, or of other fields.
    """
    path = folder / f"{kind}.json"
    value = read_json(path)
    if not isinstance(value, dict) or (value.get("kind"), value.get("schema")) != (kind, SCHEMA):
        raise ArgumentError(
            f"{path}: expected the result of `deviation {kind}` with schema {SCHEMA}; run it again"
        )
    return value


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, digits) for item in value]
    return value
