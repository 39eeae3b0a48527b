"""The record of a measurement: its file, and what it was measured on and with."""

from __future__ import annotations

import datetime
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flash_attn_deterministic
import torch
from flash_attn_deterministic.info.build_info import build_info
from flash_attn_deterministic.verify.environment import collect
from flash_attn_deterministic.verify.report import write_files


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    write_files(path.parent, {path.name: json.dumps(record, indent=1) + "\n"})


def sha256(path: Path) -> str:
    """Returns the sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment(wheel: Path | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Describes what a result was measured on and with.

    Args:
        wheel: file of the installed wheel; None leaves its name and hash out.
        arguments: the script's command line.
    """
    info = build_info()
    machine = collect("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": _command(arguments),
        "versions": {
            "flash_attn_deterministic": flash_attn_deterministic.__version__,
            "torch": machine["torch"],
            "cuda_of_torch": machine["cuda"],
            "cuda_of_wheel": info.cuda_toolkit,
            "upstream": info.upstream.version,
            "python": machine["python"],
            "driver": machine["driver"],
        },
        # What the kernels were compiled from: digests by part of the source tree.
        "bits_version": info.bits_version,
        "sources": dict(info.sources),
        "wheel": None if wheel is None else {"name": wheel.name, "sha256": sha256(wheel)},
    }
    if machine["gpu"] is not None:
        names = ("gpu", "compute_capability", "sms", "memory_gib")
        record["hardware"] = {name: machine[name] for name in names}
    return record


def _command(arguments: Sequence[str]) -> str:
    # Folders of the machine that measured are of no use to a reader.
    words = [Path(word).name if "/" in word else word for word in arguments[1:]]
    return f"python -m tests.benchmarks.{Path(arguments[0]).stem} {shlex.join(words)}".strip()
