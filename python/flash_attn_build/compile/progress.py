"""How much of a build is left, from what its translation units cost when they were last measured.

Ninja estimates from the units that it has finished. Ours differ a hundredfold, and the small ones
come first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import build_folder


def measured_seconds(root: Path) -> dict[str, float]:
    """Reads the CPU seconds of each translation unit of the release build, by its output.

    Args:
        root: The source tree.

    Returns:
        Seconds by output; empty if docs/results/build.json is not there.
    """
    path = root / "docs" / "results" / "build.json"
    if not path.exists():
        return {}
    units = json.loads(path.read_text(encoding="utf-8"))["translation_units"]
    return {unit["output"]: unit["cpu_seconds"] for unit in units}


def left(
    outputs: Iterable[str], done: Mapping[str, float], measured: Mapping[str, float]
) -> tuple[float, float]:
    """Estimates what a build has done and what is left.

    Args:
        outputs: Of all translation units.
        done: CPU seconds by output, of those that are compiled.
        measured: CPU seconds by output, on the machine of the measurement. A unit that was not
            measured counts as the mean of all.

    Returns:
        CPU seconds done and CPU seconds left, the latter at the speed of the former.
    """
    mean = sum(measured.values()) / len(measured)
    expected = {output: measured.get(output, mean) for output in outputs}
    finished = {output: seconds for output, seconds in done.items() if output in expected}
    spent = sum(finished.values())
    as_measured = sum(expected[output] for output in finished)
    slowness = spent / as_measured if as_measured else 1.0
    return spent, (sum(expected.values()) - as_measured) * slowness


def line(build_dir: Path, job_count: int, measured: Mapping[str, float], begin: float) -> str:
    """Says how far a build is.

    Args:
        build_dir: The build folder. What an earlier build compiled there counts as done.
        job_count: Compilations at once.
        measured: See `left`.
        begin: When the build began, in seconds since 1970.

    Returns:
        A line; "" before CMake has written the list of units, or where nothing was measured.
    """
    commands = build_dir / "compile_commands.json"
    if not measured or not commands.exists() or commands.stat().st_mtime < begin:
        return ""
    listed = json.loads(commands.read_text(encoding="utf-8"))
    outputs = {os.path.relpath(build_dir / command["output"], build_dir) for command in listed}
    units = build_folder.read_units(build_dir)
    spent, remaining = left(outputs, {u["output"]: u["cpu_seconds"] for u in units}, measured)
    return (
        f"{len(units)} of {len(outputs)} translation units, {spent / 60:.1f} CPU-minutes; about "
        f"{remaining / 60:.1f} CPU-minutes left, {remaining / 60 / job_count:.0f} minutes on "
        f"{job_count} cores"
    )
