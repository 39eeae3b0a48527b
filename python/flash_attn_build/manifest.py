"""The build manifest: what a wheel was made of, with what, and what that cost."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 2
_TOOLS = ("auditwheel", "build", "cmake", "ninja", "scikit-build-core", "torch", "ziglang")


def file_name(wheel: str) -> str:
    """Names the manifest of a wheel.

    Args:
        wheel: File name of the wheel.

    Returns:
        File name of its manifest, which lies beside it.
    """
    return f"{wheel}.manifest.json"


def describe(
    wheel: Path,
    info: Mapping[str, Any],
    units: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    tools: Mapping[str, str],
    places: Mapping[str, str],
) -> dict[str, Any]:
    """Describes a finished wheel.

    Args:
        wheel: The wheel.
        info: The build information it carries.
        units: What the compiler launcher noted of each translation unit.
        settings: How the build was asked for and run.
        tools: Name and version of each tool.
        places: Folders of this machine, and what to write in their stead.

    Returns:
        The manifest.
    """
    data = wheel.read_bytes()
    rows = [
        {k: unit[k] for k in ("output", "cpu_seconds", "wall_seconds", "peak_rss_bytes")}
        for unit in sorted(units, key=lambda unit: str(unit["output"]))
    ]
    cuda = [row for row in rows if row["output"].endswith(".cu.o")]
    return {
        "schema": SCHEMA,
        "wheel": {
            "name": wheel.name,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
        },
        **{k: info[k] for k in ("upstream", "cuda_toolkit", "architectures", "deterministic")},
        **{k: info[k] for k in ("torch_target", "instances", "sources")},
        "build": dict(settings),
        "tools": dict(tools),
        "flags": flags(units, places),
        "translation_units": rows,
        "totals": {
            "translation_units": len(rows),
            "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 3),
            "cuda_cpu_seconds": round(sum(row["cpu_seconds"] for row in cuda), 3),
            "peak_rss_bytes": max((row["peak_rss_bytes"] for row in rows), default=0),
        },
    }


def read_units(log_dir: Path, build_dir: Path) -> list[dict[str, Any]]:
    """Reads what the compiler launcher noted.

    Args:
        log_dir: Its folder.
        build_dir: The build folder, which the noted outputs are relative to.

    Returns:
        One record per translation unit that the build folder still has an object of.
    """
    records = [json.loads(path.read_text()) for path in sorted(log_dir.glob("*.json"))]
    return [record for record in records if (build_dir / record["output"]).exists()]


def flags(units: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> dict[str, list[str]]:
    """Picks the compiler flags of each of CMake's targets.

    Args:
        units: What the compiler launcher noted of each translation unit.
        places: Folders of this machine, and what to write in their stead.

    Returns:
        Target and language, such as "fad_kernels cuda", to the flags its translation units share.
    """
    commands: dict[str, list[Sequence[str]]] = {}
    for unit in units:
        commands.setdefault(_group(unit["output"]), []).append(unit["command"])
    return {name: common_flags(found, places) for name, found in sorted(commands.items())}


def _group(output: str) -> str:
    """CMake's target and the language: translation units of both have their flags in common."""
    found = re.search(r"CMakeFiles/([^/]+)\.dir/", output)
    language = "cuda" if output.endswith(".cu.o") else "cxx"
    return f"{found[1]} {language}" if found else language


def common_flags(commands: Sequence[Sequence[str]], places: Mapping[str, str]) -> list[str]:
    """Picks the flags that translation units share.

    Args:
        commands: Their compiler commands.
        places: Folders of this machine, and what to write in their stead.

    Returns:
        The flags in the order of the first command, without its inputs and outputs.
    """
    shared: list[str] = []
    for position, command in enumerate(commands):
        words = iter(command[1:])
        kept = []
        for word in words:
            if word in ("-o", "-MF", "-MT", "-c"):
                next(words, None)
            else:
                kept.append(word)
        shared = kept if position == 0 else [flag for flag in shared if flag in kept]
    longest_first = sorted(places.items(), key=lambda item: -len(item[0]))
    for place, name in longest_first:
        shared = [flag.replace(place, name) for flag in shared]
    return shared


def tool_versions(host_compiler: Path) -> dict[str, str]:
    """Looks up the versions of what made the wheel.

    Args:
        host_compiler: The C++ compiler.

    Returns:
        Name to version, those of packages that are installed.
    """
    version = subprocess.run(
        [host_compiler, "-dumpfullversion"], capture_output=True, text=True, check=False
    )
    versions = {"python": platform.python_version(), host_compiler.name: version.stdout.strip()}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
