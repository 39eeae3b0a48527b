"""What q, k and v of the microbenchmark are: drawn from named distributions, or captured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import ArgumentError
from .simulate import check_inputs

Draw = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _normal_mean(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return _normal(shape, generator) + 1.0


def _outliers(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = _normal(shape, generator)
    # One entry of a thousand is ten times as large, as in activations of trained models.
    return torch.where(_uniform(shape, generator) < 1e-3, 10.0 * values, values)


_DRAWS: dict[str, tuple[Draw, float]] = {
    "uniform": (_uniform, 1.0),
    "normal": (_normal, 1.0),
    "normal_mean": (_normal_mean, 1.0),
    "scaled_logits": (_normal, 4.0),
    "outliers": (_outliers, 1.0),
}
DISTRIBUTIONS = tuple(_DRAWS)


def draw(name: str, seed: int, seqlen: int, head_dim: int) -> QKV:
    """Draws q, k and v, each (seqlen, head_dim) in float64.

    Args:
        name: uniform: [0, 1); normal: N(0, 1); normal_mean: N(1, 1); scaled_logits: N(0, 1) with q
            four times as large, for peaked rows; outliers: N(0, 1), one entry of 1000 ten times as
            large.
        seed: of the generator; a seed gives the same values on every machine.
        seqlen: rows.
        head_dim: columns.

    Raises:
        ArgumentError: an unknown name.
    """
    if name not in _DRAWS:
        raise ArgumentError(f"inputs: expected one of {', '.join(_DRAWS)}, got {name!r}")
    generator = torch.Generator().manual_seed(seed)
    function, factor = _DRAWS[name]
    q, k, v = (function((seqlen, head_dim), generator) for _ in range(3))
    return q * factor, k, v


def read_inputs(path: Path) -> list[QKV]:
    """Reads captured tensors, as `capture.save` writes them.

    Returns:
        (q, k, v) of each call, each (heads, seqlen, head_dim).

    Raises:
        ArgumentError: the file is missing, is not such a file, or holds NaN or infinite values.
    """
    try:
        calls = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises what its format's parsers raise
        raise ArgumentError(
            f"inputs: expected a file of captured tensors, got {path}: {error}"
        ) from error
    if not isinstance(calls, list) or not calls:
        raise ArgumentError(
            f"inputs: expected a list of calls in {path}, got {type(calls).__name__}"
        )
    result = []
    for number, call in enumerate(calls):
        if not isinstance(call, dict) or not {"q", "k", "v"} <= set(call):
            raise ArgumentError(f"inputs: expected q, k and v in call {number} of {path}")
        q, k, v = (call[name].double().flatten(0, -3) for name in ("q", "k", "v"))
        check_inputs(q, k, v)
        result.append((q, k, v))
    return result


def digest(path: Path) -> str:
    """Returns what tells one file of captured tensors from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
