"""How far the checkpoints of two runs are apart, beside the distances of known causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ..numbers.intervals import bootstrap, mean_interval
from ..numbers.metrics import wasserstein
from ..study.files import SCHEMA, write_json
from .target import read_weights

MEASURES = ("l2", "l1", "max_difference", "wasserstein")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
# What trainers write beside the weights.
_NO_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
Files = Sequence[Path]  # of a checkpoint: one, or all shards


def compare_runs(
    run_a: Path, run_b: Path, references: dict[str, Path], out: Path
) -> dict[str, Any]:
    """Compares the checkpoints of B, and of each reference, with those of A of the same name.

    Args:
        run_a: folder of checkpoints (.safetensors, .pt, .pth, .bin; shards of a checkpoint count as
            one, files of optimizers and schedulers are left out), or one file.
        run_b: like run_a.
        references: what is known to differ, by name: a repeat, another order of the data, another
            initialisation, another precision.
        out: folder of weights.json.

    Returns:
        weights.json: {"checkpoints": {name: {run: {measure: [low, middle, high]}}}, "over": {name:
        {reference: {measure: ...}}}, "without": {reference: [checkpoints that it lacks]}}: the mean
        over weight matrices of l2 (|w - w'| / |w'|), l1, max_difference and the Wasserstein
        distance of the entries; "over" is B's distance over the reference's. Intervals are over
        the matrices of these runs: they say nothing of another seed.

    Raises:
        ArgumentError: a folder without checkpoints, no names in common, other tensors or shapes,
            or weights that are NaN.
    """
    runs = {"B": run_b, **references}
    files = {name: _checkpoints(path) for name, path in {"A": run_a, **runs}.items()}
    for name, there in files.items():
        if not files["A"].keys() & there.keys():
            raise ArgumentError(
                f"{'run_b' if name == 'B' else f'reference {name}'}: expected checkpoints named "
                f"like those of {run_a} ({', '.join(files['A'])}), got {', '.join(there)}"
            )
    shared = [name for name in files["A"] if name in files["B"]]
    checkpoints: dict[str, Any] = {}
    over: dict[str, Any] = {}
    for checkpoint in shared:
        base = _matrices(files["A"][checkpoint])
        found = {
            name: _distances(files[name][checkpoint], base)
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


def _checkpoints(path: Path) -> dict[str, Files]:
    """Returns the files of each checkpoint by its name; a single file has no name."""
    if path.is_file():
        return {"the file": [path]}
    found: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        if file.suffix in _SUFFIXES and not file.name.startswith(_NO_WEIGHTS):
            name = file.with_name(_SHARD.sub("", file.stem) + file.suffix)
            found.setdefault(name.relative_to(path).as_posix(), []).append(file)
    if not found:
        what = "no such file" if path.is_dir() else "no such folder or file"
        raise ArgumentError(f"run: expected checkpoints ({', '.join(_SUFFIXES)}) in {path}, {what}")
    return dict(found)


def _matrices(files: Files) -> dict[str, torch.Tensor]:
    every = {name: weight for file in files for name, weight in read_weights(file).items()}
    weights = {n: t for n, t in every.items() if t.ndim >= 2 and t.is_floating_point()}
    if not weights:
        raise ArgumentError(f"{files[0]}: expected weight matrices, got none")
    for name, weight in weights.items():
        bad = int(weight.numel() - weight.isfinite().sum())
        if bad:
            raise ArgumentError(
                f"{files[0]}: expected finite weights, got {bad} NaN or infinite ones in {name}"
            )
    return weights


def _distances(files: Files, base: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    weights = _matrices(files)
    if weights.keys() != base.keys():
        lacks, more = sorted(base.keys() - weights.keys()), sorted(weights.keys() - base.keys())
        raise ArgumentError(
            f"{files[0]}: expected the weight matrices of run A, got "
            f"{len(lacks)} fewer ({', '.join(lacks[:4]) or '-'}) and "
            f"{len(more)} more ({', '.join(more[:4]) or '-'})"
        )
    for name, right in base.items():
        left = weights[name]
        if left.shape != right.shape:
            raise ArgumentError(
                f"{files[0]}: expected {name} of shape {tuple(right.shape)}, got "
                f"{tuple(left.shape)}"
            )
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
