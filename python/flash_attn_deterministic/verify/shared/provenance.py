"""Where a result comes from: machine, versions, wheel, sources of the kernels, date and command."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_DISTRIBUTION = "flash-attn-deterministic"
_PACKAGE = "flash_attn_deterministic"


def provenance(
    command: Sequence[str], device: str, wheel: Path | None = None, **versions: str | None
) -> dict[str, Any]:
    """Returns what every result begins with; the device is "cuda" or "cpu".

    `wheel` is the installed wheel's file; None: what the installer recorded of it. `versions` are
    those of other libraries that were measured.
    """
    named = _installed_wheel()
    if wheel is not None:
        named = {"name": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    return provenance_of(command, machine(device), named, **versions)


def provenance_of(
    command: Sequence[str],
    machine: Mapping[str, Any],
    wheel: Mapping[str, str] | None,
    **versions: str | None,
) -> dict[str, Any]:
    """Returns the same of a machine that was described before.

    It is `date`, `command` (of paths the last part is kept), `hardware`, `versions`; `wheel` (name
    and sha256), `sources` (digests of what its kernels were compiled from) and `bits_version`, each
    None without this package.
    """
    built = _build_info()
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions[_PACKAGE] = metadata.version(_DISTRIBUTION)
    rest = {name: value for name, value in machine.items() if name not in HARDWARE}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(Path(word).name or word if "/" in word else word for word in command),
        "hardware": {name: machine.get(name) for name in HARDWARE},
        "versions": {**rest, **versions, "cuda_of_wheel": built.get("cuda_toolkit")},
        "wheel": wheel,
        "sources": built.get("sources"),
        "bits_version": built.get("bits_version"),
    }


HARDWARE = ("gpu", "compute_capability", "sms", "memory_gib", "system", "cpus")


def machine(device: str) -> dict[str, Any]:
    """Describes the machine, and for "cuda" its first GPU."""
    record: dict[str, Any] = {
        "gpu": None,
        "compute_capability": None,
        "sms": None,
        "memory_gib": None,
        "driver": None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "glibc": " ".join(platform.libc_ver()).strip() or None,
        "cpus": os.cpu_count(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _driver(),
        }
    return record


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def _build_info() -> dict[str, Any]:
    """Returns the build's record of the package, without importing it; empty: there is none."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError, ValueError):
            record: dict[str, Any] = json.loads(Path(folder, "_build_info.json").read_bytes())
            return record
    return {}


def _installed_wheel() -> dict[str, str] | None:
    """Returns name and sha256 of the wheel, where it was installed from a file."""
    try:
        text = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
        origin = json.loads(text or "{}")
        digest = origin["archive_info"]["hashes"]["sha256"]
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
    return {"name": str(origin["url"]).rpartition("/")[2], "sha256": str(digest)}
