"""Folders of results of one wheel: their record, and their copies in docs/results."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_attn_build.files import write_json

from tests.benchmarks.shared.steps import ROOT, Outcome, Step

RESULTS = ROOT / "docs" / "results"
RECORD = "gpu-tests.json"
# Results in a folder that differ in one of these do not belong together.
_SAME = ("sources", "wheel", "hardware", "versions")


def read_record(out: Path) -> dict[str, Any]:
    """Reads the record that `run` wrote into a folder.

    Raises:
        OSError: there is none.
        ValueError: it is something else.
    """
    path = out / RECORD
    record = _read(path)
    try:
        whole = isinstance(record["sources"], dict) and all(
            {"name", "status"} <= set(one) for one in record["steps"]
        )
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: not what `run` writes; expected sources and steps")
    found: dict[str, Any] = record
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


def begin(out: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Begins the record of a folder, or continues that of an earlier run.

    Args:
        out: the folder.
        record: what is installed here, and the machine.

    Returns:
        The record, with the steps of the earlier run.

    Raises:
        ValueError: the folder holds results of something else.
    """
    steps: list[dict[str, Any]] = []
    if (out / RECORD).exists():
        earlier = read_record(out)
        differing = [name for name in _SAME if earlier.get(name) != record.get(name)]
        if differing:
            raise ValueError(
                f"--out: {out} holds results of another run, whose {', '.join(differing)} "
                "differ; name another folder"
            )
        steps = earlier["steps"]
    begun = {**record, "steps": steps}
    write_json(out / RECORD, begun)
    return begun


def write_outcomes(out: Path, begun: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes the record of a folder with outcomes in the place of those of an earlier run."""
    steps = _replaced(begun["steps"], list(map(asdict, outcomes)))
    write_json(out / RECORD, {**begun, "steps": steps})


def _replaced(before: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {step["name"] for step in steps}
    return [*(step for step in before if step["name"] not in names), *steps]


def install(
    out: Path, results: Path, sources: Mapping[str, str], steps: Iterable[Step]
) -> list[str]:
    """Copies results that are complete.

    Args:
        out: folder that `run` filled.
        results: docs/results.
        sources: digests of the source tree, by part.
        steps: all there are.

    Returns:
        What was copied.

    Raises:
        OSError: the folder has no record.
        ValueError: `run` did not fill it, no step ended, or results are of other kernels.
    """
    record = read_record(out)
    _expect_sources(sources, record, RECORD)
    # None: killed at its limit; below 0: by a signal.
    statuses = {one["name"]: one["status"] for one in record["steps"]}
    ended = {name for name, status in statuses.items() if status is not None and status >= 0}
    if not ended:
        raise ValueError(f"{out}: no step has come to its end")
    named = [step.result for step in steps if step.result and step.name in ended]
    copied = [name for name in named if (out / name).exists()]
    for name in copied:
        inside = sorted((out / name).rglob("*.json")) if (out / name).is_dir() else [out / name]
        for path in inside:
            _expect_sources(sources, _read(path), path.relative_to(out).as_posix())
    for name in copied:
        if (out / name).is_dir():
            shutil.copytree(out / name, results / name, dirs_exist_ok=True)
        else:
            shutil.copy(out / name, results / name)
    # Steps of this wheel that were installed before, and are not in this folder, stay.
    with contextlib.suppress(OSError, ValueError):
        before = read_record(results)
        if all(before.get(name) == record.get(name) for name in _SAME):
            record["steps"] = _replaced(before["steps"], record["steps"])
    write_json(results / RECORD, record)
    return copied


def _expect_sources(sources: Mapping[str, str], record: Any, name: str) -> None:
    differing = of_other_kernels(sources, record)
    if differing:
        raise ValueError(f"{name}: the results are of other kernels: {', '.join(differing)} differ")


def of_other_kernels(sources: Mapping[str, str], record: Any) -> list[str]:
    """Returns the parts of the source tree in which a result differs; none if it names none."""
    own: Mapping[str, str] | None = None
    if isinstance(record, dict):
        # Of a benchmark; of a report of verify, or of a study.
        parts = (record, record.get("build"), record.get("environment"))
        own = next((p["sources"] for p in parts if isinstance(p, dict) and "sources" in p), None)
    return [part for part in sources if own.get(part) != sources[part]] if own else []


def left_behind(results: Path, sources: Mapping[str, str]) -> list[str]:
    """Returns the names of results that are of other kernels than the source tree's."""
    paths = sorted(results.rglob("*.json"))
    return [
        path.relative_to(results).as_posix()
        for path in paths
        if of_other_kernels(sources, _read(path))
    ]
