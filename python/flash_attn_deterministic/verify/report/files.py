"""Writes files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ...errors import FlashAttnError


class ReportError(FlashAttnError, OSError):
    """Files could not be written."""


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes text files that belong together.

    All are written under temporary names first and renamed only when every byte of every one is on
    disk, so that a full disk leaves what was there before.

    Args:
        folder: made if missing.
        texts: file name to content.

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
