"""What q, k and v of the microbenchmark are: drawn from named distributions, or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from ...errors import ArgumentError
from ..attentions.masks import Call
from ..emulate.simulate import check_inputs
from ..study.files import whole_file

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


_FIELDS = tuple(field.name for field in fields(Call))


def save_calls(calls: Sequence[Call], path: Path) -> None:
    """Writes calls of attention, for `deviation forward --inputs`."""
    with whole_file(path) as temporary:
        torch.save([{name: getattr(call, name) for name in _FIELDS} for call in calls], temporary)


def read_calls(path: Path) -> list[Call]:
    """Reads what `save_calls` writes: tensors, mask, causal, scale and window of each call.

    Raises:
        ArgumentError: the file is missing, is not such a file, or holds NaN or infinite values.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises what its format's parsers raise
        raise ArgumentError(
            f"inputs: expected a file of captured tensors, got {path}: {error}"
        ) from error
    if not isinstance(found, list) or not found:
        raise ArgumentError(
            f"inputs: expected a list of calls in {path}, got {type(found).__name__}"
        )
    calls = []
    for number, entry in enumerate(found):
        # A call without its mask or scale would be replayed as another one.
        if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
            raise ArgumentError(
                f"inputs: expected {', '.join(_FIELDS)} in call {number} of {path}, got "
                f"{', '.join(entry) if isinstance(entry, dict) else type(entry).__name__}"
            )
        call = Call(**{**entry, "window": tuple(entry["window"])})
        plain = call.plain()
        check_inputs(plain.q, plain.k, plain.v)
        calls.append(call)
    return calls
