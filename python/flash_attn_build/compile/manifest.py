"""The build manifest: sources, tools and options of a wheel, and what compiling it cost."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ..errors import RefusedError
from ..files import ROOT, read_json, sha256_of
from .toolchain import compiler_name

SCHEMA = 4
# Fields of the wheel's _build_info.json that the manifest repeats.
FROM_WHEEL = ("upstream", "cuda_toolkit", "architectures", "deterministic", "torch_target",
              "instances", "sources", "bits_version")  # fmt: skip


def path_of(wheel: Path) -> Path:
    """Names the manifest of a wheel, which lies beside it."""
    return wheel.with_name(f"{wheel.name}.manifest.json")


def read(wheel: Path) -> dict[str, Any]:
    """Reads the manifest beside a wheel, of whatever schema; refuses that of other bytes."""
    path, sha256 = path_of(wheel), sha256_of(wheel)
    try:
        text: dict[str, Any] = read_json(path)
        stated = text["wheel"]["sha256"]
    except FileNotFoundError as error:
        raise RefusedError(f"{path.name} is missing; the build writes it") from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RefusedError(f"{path.name} is unreadable ({error!r})") from error
    if stated != sha256:
        raise RefusedError(f"{path.name} is of another wheel ({stated!r:.80}, not {sha256})")
    return text


def describe(
    wheel: Path,
    info: Mapping[str, Any],
    units: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    tools: Mapping[str, str],
    places: Mapping[str, str],
    cost: Mapping[str, float],
) -> dict[str, Any]:
    """Describes a finished wheel: the build information in it, its translation units
    (`build_folder.read_units`), how the build was asked for, tools and their versions, and cost.

    `places`: folders of this machine, and what to write instead of each.
    """
    return {
        "schema": SCHEMA,
        "wheel": {
            "name": wheel.name, "sha256": sha256_of(wheel), "bytes": wheel.stat().st_size
        },
        **{key: info[key] for key in FROM_WHEEL},
        "build": dict(settings),
        "tools": dict(tools),
        "flags": flags(units, places),
        "translation_units": [
            {key: unit[key] for key in ("output", "wall_seconds")} for unit in units
        ],
        "totals": {"translation_units": len(units), **cost},
    }  # fmt: skip


def flags(units: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> dict[str, list[str]]:
    """Picks the compiler flags that the units of a target and language share."""
    named: dict[str, list[str]] = {}
    for unit in units:
        found = re.search(r"CMakeFiles/([^/]+)\.dir/", unit["output"])
        language = "cuda" if unit["output"].endswith(".cu.o") else "cxx"
        name = f"{found[1]} {language}" if found else language
        words = zip(unit["command"][1:], unit["command"], strict=False)
        # Each of these options is followed by an input or an output.
        kept = [word for word, before in words if not {word, before} & {"-o", "-MF", "-MT", "-c"}]
        named[name] = [flag for flag in named.get(name, kept) if flag in kept]
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):  # longest first
        named = {key: [flag.replace(place, name) for flag in each] for key, each in named.items()}
    return dict(sorted(named.items()))


def locked(cuda: str, root: Path = ROOT) -> Iterator[Requirement]:
    """Reads the requirements that a build with `--locked` installs, of one version each."""
    for name in ("build", "torch", "cuda12" if cuda.startswith("12.") else "cuda"):
        text = (root / "locks" / f"{name}.txt").read_text(encoding="utf-8")
        found = re.findall(r"^([a-z0-9].*?==.+?) --hash", text, re.MULTILINE)
        if not found:
            raise LookupError(f"locks/{name}.txt: names no version")
        yield from map(Requirement, found)


def tool_versions(cuda: str, host_compiler: tuple[str, ...]) -> dict[str, str]:
    """Looks up the versions of the compilers, and of every installed package that locks/ names.

    That of the host compiler is the line it prints, which names the distribution that built it.
    """
    command = [*host_compiler, "--version"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    name = compiler_name(host_compiler)
    versions = {"nvcc": cuda, name: said.removeprefix(name).strip()}
    versions["python"] = platform.python_version()
    for requirement in locked(cuda):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[requirement.name] = importlib.metadata.version(requirement.name)
    return versions


def machine(environ: Mapping[str, str]) -> dict[str, str]:
    """Names the system that a build runs on, and on GitHub's runners the image."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        system = platform.system()
    image = f"{environ.get('ImageOS', '')} {environ.get('ImageVersion', '')}".strip()
    return {"system": system, "image": image}
