"""The folder of a build: what an earlier one left there, and how much of this one is left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files

STAMP = "made_with.json"
LOGS = "launcher"  # folder for the compiler launcher's records

# Environment variables that change what compilers make.
_PREFIXES = ("CMAKE_", "NVCC_", "SKBUILD_", "ZIG_")
_NAMES = frozenset(
    {
        "CCC_OVERRIDE_OPTIONS",  # clang's, which zig is
        "CFLAGS",
        "COMPILER_PATH",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "CUDAFLAGS",
        "CUDAHOSTCXX",
        "CXXFLAGS",
        "C_INCLUDE_PATH",
        "GCC_EXEC_PREFIX",
        "LDFLAGS",
        "LIBRARY_PATH",
    }
)
# These change only how fast a build is and what it prints.
_HARMLESS = frozenset(
    {
        "CMAKE_BUILD_PARALLEL_LEVEL",
        "CMAKE_COLOR_DIAGNOSTICS",
        "CMAKE_EXPORT_COMPILE_COMMANDS",
    }
)


def influences(environ: Mapping[str, str]) -> dict[str, str]:
    """Picks the variables that can change a wheel, and that sources and options do not show.

    CUDACXX, CXX and the like are not among them: the manifest has the compilers' versions.

    Args:
        environ: The environment of a build.

    Returns:
        Those that are set to something, in the order of names.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if value.strip()
        and name not in _HARMLESS
        and (name in _NAMES or name.startswith(_PREFIXES))
    }


def renew(build_dir: Path, made_with: Mapping[str, Any]) -> None:
    """Removes what CMake stored in earlier builds; keeps objects that are still valid.

    CMake keeps an option until another value is given, so a build without options would use those
    of the last one. `cmake --fresh` would remove the objects as well. Ninja notices a changed
    command or file, but not a compiler that was replaced under the same path, nor an environment
    variable: where those differ, objects are removed too.

    Args:
        build_dir: The build folder; it need not exist.
        made_with: What objects depend on and Ninja does not see, ready for JSON.
    """
    stamp, state = build_dir / STAMP, build_dir / "CMakeFiles"
    wanted = json.dumps(made_with, indent=2, sort_keys=True) + "\n"
    (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
    same = stamp.exists() and stamp.read_text(encoding="utf-8") == wanted
    # Folders named by CMake's version hold what it detected of the compilers.
    for folder in state.glob("[0-9]*") if same else [state, build_dir / LOGS]:
        if folder.exists():
            shutil.rmtree(folder)
    files.write_text(stamp, wanted)


def read_units(build_dir: Path) -> dict[str, dict[str, Any] | None]:
    """Reads what the compiler launcher noted of the translation units of this configuration.

    Args:
        build_dir: The build folder, with the compile_commands.json that CMake wrote: objects of an
            earlier configuration may lie there too, and are left out.

    Returns:
        Record by output, in the order of outputs; None for a unit that is not compiled yet.
    """
    commands = json.loads((build_dir / "compile_commands.json").read_text(encoding="utf-8"))
    # CMake writes whole paths there, and the compilers get them relative to the folder.
    outputs = {os.path.relpath(build_dir / command["output"], build_dir) for command in commands}
    records = [json.loads(path.read_text()) for path in (build_dir / LOGS).glob("*.json")]
    found = {record["output"]: record for record in records}
    return {output: found.get(output) for output in sorted(outputs)}


def progress(build_dir: Path, job_count: int, begin: float, root: Path = files.ROOT) -> str:
    """Estimates how much of a build is left, from the last measured cost of each unit.

    Ninja estimates from the units that it has finished. Their costs differ a hundredfold here, and
    the small ones come first.

    Args:
        build_dir: The build folder. What an earlier build compiled there counts as done.
        job_count: Compilations at once.
        begin: When the build began, in seconds since 1970.
        root: The source tree, whose docs/results has the costs of the release build.

    Returns:
        A line; "" before CMake has written the list of units, or where nothing was measured.
    """
    commands, manifest = build_dir / "compile_commands.json", root / "docs/results/build.json"
    if not manifest.exists() or not commands.exists() or commands.stat().st_mtime < begin:
        return ""
    rows = json.loads(manifest.read_text(encoding="utf-8"))["translation_units"]
    measured = {row["output"]: row["cpu_seconds"] for row in rows}
    mean = sum(measured.values()) / len(measured)
    units = read_units(build_dir)
    # A unit that was not measured counts as the mean of all.
    expected = {output: measured.get(output, mean) for output in units}
    done = {output: unit["cpu_seconds"] for output, unit in units.items() if unit}
    spent, as_measured = sum(done.values()), sum(expected[output] for output in done)
    # Scaled by the speed so far: the costs were measured on another machine.
    left = (sum(expected.values()) - as_measured) * (spent / as_measured if as_measured else 1.0)
    return (
        f"{len(done)} of {len(units)} translation units, {spent / 60:.1f} CPU-minutes; about "
        f"{left / 60:.1f} CPU-minutes left, {left / 60 / job_count:.0f} minutes on "
        f"{job_count} cores"
    )
