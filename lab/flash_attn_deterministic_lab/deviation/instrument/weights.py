"""How far the checkpoints of two runs are apart, beside the distances of known causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ..numbers.metrics import distances
from ..study.files import new_result, write_result
from .target import read_weights

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
        references: what is known to differ, by name: a repeat, other data or initial weights.
        out: folder of weights.json.

    Returns:
        weights.json: {"checkpoints": {name: {run: `distances` of the weight matrices}}, "without":
        {reference: [checkpoints that it lacks]}}.

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
    checkpoints: dict[str, dict[str, dict[str, float]]] = {}
    for checkpoint in shared:
        base = _matrices(files["A"][checkpoint])
        checkpoints[checkpoint] = {
            name: _distances(files[name][checkpoint], base)
            for name in runs
            if checkpoint in files[name]
        }
    value = {
        **new_result("weights", {"A": run_a.name, **{n: path.name for n, path in runs.items()}}),
        "checkpoints": checkpoints,
        "without": {name: [c for c in shared if c not in files[name]] for name in references},
    }
    write_result(out, value)
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
    return weights


def _distances(files: Files, base: dict[str, torch.Tensor]) -> dict[str, float]:
    weights = _matrices(files)
    here, there = ({(n, tuple(t.shape)) for n, t in found.items()} for found in (weights, base))
    if here != there:
        only_a, only_here = (", ".join(f"{n} {s}" for n, s in sorted(found)[:4]) or "-"
                             for found in (there - here, here - there))  # fmt: skip
        raise ArgumentError(
            f"{files[0]}: expected the weight matrices of run A; only A has {only_a}, only this "
            f"one {only_here}"
        )
    return distances([weights[name] for name in base], list(base.values()))


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
