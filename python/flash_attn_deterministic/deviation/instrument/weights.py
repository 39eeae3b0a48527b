"""How far the checkpoints of two runs are apart, beside the distances of known causes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ..numbers.intervals import bootstrap, mean_interval
from ..numbers.metrics import wasserstein
from ..study.files import SCHEMA, write_json
from .target import read_weights

MEASURES = ("l2", "l1", "max_difference", "wasserstein")


def compare_runs(
    run_a: Path, run_b: Path, references: dict[str, Path], out: Path
) -> dict[str, Any]:
    """Compares the checkpoints of B, and of each reference, with those of A of the same name.

    Args:
        run_a: folder of checkpoints (.safetensors, .pt, .pth, .bin), or one file.
        run_b: like run_a.
        references: what is known to differ, by name: a repeat, another order of the data, another
            initialisation, another precision.
        out: folder of weights.json.

    Returns:
        weights.json: {"checkpoints": {name: {run: {measure: [low, middle, high]}}}, "over": {name:
        {reference: {measure: ...}}}}: the mean over weight matrices of l2 (|w - w'| / |w'|), l1,
        max_difference and the Wasserstein distance of the entries; "over" is B's distance over the
        reference's. Intervals are bootstraps over matrices.

    Raises:
        ArgumentError: a folder without checkpoints, no names in common, or other shapes.
    """
    runs = {"B": run_b, **references}
    files = {name: _checkpoints(path) for name, path in {"A": run_a, **runs}.items()}
    shared = [name for name in files["A"] if name in files["B"]]
    if not shared:
        raise ArgumentError(
            f"run_b: expected checkpoints named like those of {run_a} ({', '.join(files['A'])}), "
            f"got {', '.join(files['B'])}"
        )
    checkpoints: dict[str, Any] = {}
    over: dict[str, Any] = {}
    for checkpoint in shared:
        base = _matrices(files["A"][checkpoint])
        found = {
            name: _distances(_matrices(files[name][checkpoint]), base, files[name][checkpoint])
            for name in runs
            if checkpoint in files[name]
        }
        checkpoints[checkpoint] = {
            name: {m: mean_interval(distances[m]).listed() for m in MEASURES}
            for name, distances in found.items()
        }
        over[checkpoint] = {
            name: {measure: _over(found["B"][measure], found[name][measure])
                   for measure in MEASURES}
            for name in found
            if name != "B"
        }  # fmt: skip
    value = {
        "kind": "weights", "schema": SCHEMA, "checkpoints": checkpoints, "over": over,
        "without": {name: [c for c in shared if c not in files[name]] for name in references},
    }  # fmt: skip
    write_json(out / "weights.json", value, indent=1, digits=4)
    return value


def _checkpoints(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.name: path}
    suffixes = (".safetensors", ".pt", ".pth", ".bin")
    found = {
        file.relative_to(path).as_posix(): file
        for file in sorted(path.rglob("*"))
        if file.suffix in suffixes
    }
    if not found:
        raise ArgumentError(f"run: expected checkpoints ({', '.join(suffixes)}) in {path}")
    return found


def _matrices(path: Path) -> dict[str, torch.Tensor]:
    weights = {n: t for n, t in read_weights(path).items() if t.ndim >= 2 and t.is_floating_point()}
    if not weights:
        raise ArgumentError(f"{path}: expected weight matrices, got none")
    return weights


def _distances(
    weights: dict[str, torch.Tensor], base: dict[str, torch.Tensor], path: Path
) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for name, right in base.items():
        left = weights.get(name)
        if left is None or left.shape != right.shape:
            got = "none" if left is None else str(tuple(left.shape))
            raise ArgumentError(f"{path}: expected {name} of shape {tuple(right.shape)}, got {got}")
        size = (left.double() - right.double()).abs()
        result["l2"].append(float(size.norm() / right.double().norm().clamp(min=1e-300)))
        result["l1"].append(float(size.mean()))
        result["max_difference"].append(float(size.max()))
        result["wasserstein"].append(wasserstein(left, right))
    return result


def _over(above: list[float], below: list[float]) -> list[float] | None:
    """The ratio of the means, matrices drawn together; None where the reference is no distance."""
    left, right = (torch.tensor(v, dtype=torch.float64) for v in (above, below))
    if not float(right.sum()):
        return None
    smallest = torch.finfo(torch.float64).tiny
    return bootstrap(
        len(above), lambda i: left[i].mean(-1) / right[i].mean(-1).clamp(min=smallest)
    ).listed()


def parse_references(texts: Iterable[str]) -> dict[str, Path]:
    """Reads NAME=FOLDER, or a folder alone, which is named by its last part.

    Raises:
        ArgumentError: one without a folder, or two of one name.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equal, folder = text.partition("=")
        path = Path(folder if equal else name)
        name = name if equal else path.name
        if not name or name in ("A", "B") or name in found:
            raise ArgumentError(
                f"reference: expected NAME=FOLDER with a name of its own, got {text!r}"
            )
        if not path.exists():
            raise ArgumentError(f"reference: expected a folder of checkpoints, got {path}")
        found[name] = path
    return found
