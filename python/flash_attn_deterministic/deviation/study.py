"""Studies on disk: a folder that belongs to one configuration and is resumed, never overwritten."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from .cells import Cell, Result, identity, run_cell
from .files import read_json, write_json
from .parallel import each
from .progress import Progress

SCHEMA = 1
_STUDY_FILE = "study.json"


def open_study(folder: Path, kind: str, configuration: dict[str, Any], force: bool) -> str:
    """Makes or resumes the folder of a study.

    Args:
        folder: where it is.
        kind: forward, kernels or training.
        configuration: what decides the results.
        force: whether the results of another study in this folder are deleted.

    Returns:
        The hash of kind and configuration.

    Raises:
        ArgumentError: the folder holds another study, or files of something else.
    """
    key = identity({"kind": kind, "configuration": configuration, "schema": SCHEMA})
    path = folder / _STUDY_FILE
    if path.exists():
        found = read_json(path)
        if isinstance(found, dict) and found.get("hash") == key:
            return key
        if not force:
            other = found.get("kind") if isinstance(found, dict) else None
            raise ArgumentError(
                f"out: {folder} holds a study of another configuration ({other}); give another "
                f"folder, or --force to delete it"
            )
        for name in ("cells", "runs"):
            shutil.rmtree(folder / name, ignore_errors=True)
    elif folder.exists() and any(folder.iterdir()) and not force:
        raise ArgumentError(
            f"out: expected an empty folder or one of this study, got {folder} with other files; "
            f"--force uses it all the same"
        )
    write_json(path, {"kind": kind, "configuration": configuration, "hash": key}, indent=1)
    return key


def environment(device: str = "cpu") -> dict[str, Any]:
    """Returns what a reader wants to know of the machine."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found


def run_cells(folder: Path, cells: Sequence[Cell], jobs: int, name: str) -> dict[str, Result]:
    """Runs the cells that are not on disk yet; each is written as soon as it is done.

    Returns:
        The result of each cell, by its identity.

    Raises:
        ArgumentError: a cell's configuration is wrong, or a file of a cell is no such file.
    """
    for cell in cells:
        cell.check()
    store = folder / "cells"
    results: dict[str, Result] = {}
    todo: dict[str, Cell] = {}
    for cell in cells:
        path = store / f"{cell.identity()}.json"
        if path.exists():
            results[cell.identity()] = read_json(path)["result"]
        else:
            todo[cell.identity()] = cell
    total = len(results) + len(todo)
    # The dearest first, so that no process is left with one of them at the end.
    order = sorted(todo.values(), key=lambda cell: -_cost(cell))
    with Progress(name, total, total - len(todo)) as progress:
        for cell, result in each(run_cell, order, jobs):
            value = {"cell": asdict(cell), "result": result}
            write_json(store / f"{cell.identity()}.json", value)
            results[cell.identity()] = result
            progress.advance(f"{cell.preset} {cell.format} {cell.inputs} {cell.seqlen}")
    return results


def _cost(cell: Cell) -> float:
    slow = 3 if cell.preset != "paper" or cell.exact_order else 1
    return cell.seqlen**2 * cell.seeds * slow


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Gives a list that holds the seconds taken, once the block is left."""
    taken: list[float] = []
    start = time.monotonic()
    yield taken
    taken.append(time.monotonic() - start)
