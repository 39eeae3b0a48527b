"""Writes files whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINE = 1500  # characters of JSON: a measured case


class ReportError(OSError):
    """Files could not be written."""


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes text files that belong together, by name, into a folder that is made if missing.

    All are written under temporary names first and renamed only when every byte of every one is on
    disk, so that a full disk leaves what was there before.

    Raises:
        ReportError: the folder or a file cannot be written; the message names it.
    """
    temporary: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            descriptor, temporary[name] = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary[name], 0o644)
        for name in texts:
            os.replace(temporary[name], folder / name)
            del temporary[name]
    except OSError as error:
        raise ReportError(
            f"cannot write to {folder}: {error.strerror or error}; choose another folder with --out"
        ) from error
    finally:
        for path in temporary.values():
            Path(path).unlink(missing_ok=True)


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
    """Returns a record as JSON in which what is short stands on one line: small, with good diffs.

    Raises:
        ValueError: a number is NaN or infinite; `finite` replaces them.
    """
    return _lines(record, "\n") + "\n"


def _lines(value: Any, end: str) -> str:
    line = json.dumps(value, allow_nan=False)
    if len(line) <= _LINE or not isinstance(value, (Mapping, list, tuple)):
        return line
    inner = f"{end} "
    if isinstance(value, Mapping):
        items = [f"{json.dumps(str(name))}: {_lines(item, inner)}" for name, item in value.items()]
        return f"{{{inner}{f',{inner}'.join(items)}{end}}}"
    return f"[{inner}{f',{inner}'.join(_lines(item, inner) for item in value)}{end}]"
