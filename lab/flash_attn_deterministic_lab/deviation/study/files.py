"""Results of studies, as files."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ...shared.files import ReportError, write_files
from ...shared.provenance import provenance

SCHEMA = 3  # of the fields of every result


def load_tensors(path: Path, expected: str) -> Any:
    """Reads what torch.save wrote: tensors in lists and dicts, on the CPU.

    Raises:
        ArgumentError: it is no such file; the message begins with what was expected.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises what its format's parsers raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's advice is to load it unsafely
            reason = "torch.load(weights_only=True) does not read it"
        raise ArgumentError(f"{expected}, got {path}: {reason}") from error


def check_writable(folder: Path) -> None:
    """Fails before a study computes what it could not write.

    Raises:
        ReportError: the folder, or the one that it would be made in, cannot be written to.
    """
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ReportError(f"cannot write to {folder}; choose another folder with --out")


def new_result(kind: str, configuration: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Returns what the result of a study begins with."""
    found = {"kind": kind, "schema": SCHEMA, "configuration": configuration}
    return {**found, **provenance(["flash-attn-deterministic", *sys.argv[1:]], device)}


def write_result(folder: Path, value: dict[str, Any], digits: int = 4) -> None:
    """Writes KIND.json: numbers to so many digits, NaN and infinities as null."""
    plain = json.loads(
        json.dumps(value),
        parse_float=lambda number: float(f"{float(number):.{digits}g}"),
        parse_constant=lambda _: None,
    )
    text = json.dumps(plain, separators=(",", ":"))
    write_files(folder, {f"{value['kind']}.json": text + "\n"})


def read_result(folder: Path, kind: str) -> dict[str, Any]:
    """Reads what `write_result` wrote.

    Raises:
        ArgumentError: the file is missing, no JSON, no result of this study, or of other fields.
    """
    path = folder / f"{kind}.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: expected a JSON file of a study, got {error}") from error
    if not isinstance(value, dict) or (value.get("kind"), value.get("schema")) != (kind, SCHEMA):
        raise ArgumentError(
            f"{path}: expected the result of `deviation {kind}` with schema {SCHEMA}; run it again"
        )
    return value
