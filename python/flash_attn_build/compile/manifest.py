"""The build manifest: what a wheel was made of, with what, and what that cost."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import WheelError
from ..files import sha256_of
from . import locks
from .toolchain import compiler_name

SCHEMA = 3
# What the wheel says of itself (_build_info.json), and the manifest repeats.
FROM_WHEEL = ("upstream", "cuda_toolkit", "architectures", "deterministic", "torch_target",
              "instances", "sources", "bits_version")  # fmt: skip


def path_of(wheel: Path) -> Path:
    """Names the manifest of a wheel, which lies beside it."""
    return wheel.with_name(f"{wheel.name}.manifest.json")


def read(wheel: Path) -> dict[str, Any]:
    """Reads the manifest beside a wheel.

    Args:
        wheel: The wheel.

    Returns:
        The manifest; that it is of this wheel is not checked.

    Raises:
        WheelError: It is missing, or no manifest of this form.
    """
    path = path_of(wheel)
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WheelError(f"{path.name} is missing; the build writes it beside the wheel") from error
    except (OSError, ValueError) as error:
        raise WheelError(f"{path.name} is unreadable ({error})") from error
    if not isinstance(text, dict) or text.get("schema") != SCHEMA:
        raise WheelError(f"expected schema {SCHEMA} in {path.name}")
    return text


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
    keys = ("output", "cpu_seconds", "wall_seconds", "peak_rss_bytes")
    rows = [{key: unit[key] for key in keys} for unit in units]
    cuda = [row for row in rows if row["output"].endswith(".cu.o")]
    return {
        "schema": SCHEMA,
        "wheel": {
            "name": wheel.name,
            "sha256": sha256_of(wheel),
            "bytes": wheel.stat().st_size,
        },
        **{key: info[key] for key in FROM_WHEEL},
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


def flags(units: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> dict[str, list[str]]:
    """Picks the compiler flags of each of CMake's targets.

    Args:
        units: What the compiler launcher noted of each translation unit.
        places: Folders of this machine, and what to write in their stead.

    Returns:
        Target and language, such as "fad_kernels cuda", to the flags its translation units share,
        in the order of the first command, without its inputs and outputs.
    """
    commands: dict[str, list[Sequence[str]]] = {}
    for unit in units:
        found = re.search(r"CMakeFiles/([^/]+)\.dir/", unit["output"])
        language = "cuda" if unit["output"].endswith(".cu.o") else "cxx"
        name = f"{found[1]} {language}" if found else language
        commands.setdefault(name, []).append(unit["command"])
    return {name: _common_flags(found, places) for name, found in sorted(commands.items())}


def _common_flags(commands: Sequence[Sequence[str]], places: Mapping[str, str]) -> list[str]:
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
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):  # longest first
        shared = [flag.replace(place, name) for flag in shared]
    return shared


def tool_versions(cuda: str, host_compiler: tuple[str, ...]) -> dict[str, str]:
    """Looks up the versions of what makes the wheel.

    Args:
        cuda: Version of nvcc.
        host_compiler: Command of the C++ compiler.

    Returns:
        Name to version: the compilers, and every installed package that locks/ names. That of the
        host compiler is in its own words, which tell a distribution's build from another's.
    """
    said = subprocess.run(
        [*host_compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout.partition("\n")[0]
    name = compiler_name(host_compiler)
    versions = {
        "nvcc": cuda,
        name: said.removeprefix(name).strip(),
        "python": platform.python_version(),
    }
    for requirement in locks.requirements(cuda):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[requirement.name] = importlib.metadata.version(requirement.name)
    return versions


def machine(environ: Mapping[str, str]) -> dict[str, str]:
    """Names the system that a build runs on.

    Args:
        environ: Environment: GitHub's runners say there which image they were started from.

    Returns:
        `system`, such as "Debian GNU/Linux 12 (bookworm)", and `image`, or "".
    """
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        system = ""
    image = f"{environ.get('ImageOS', '')} {environ.get('ImageVersion', '')}".strip()
    return {"system": system or platform.system(), "image": image}
