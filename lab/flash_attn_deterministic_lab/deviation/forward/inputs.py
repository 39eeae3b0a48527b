"""What q, k and v of the microbenchmark are: drawn from named distributions, or captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from ...errors import ArgumentError
from ..attentions.masks import Call
from ..emulate.simulate import check_inputs
from ..study.files import load_tensors, whole_file

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DISTRIBUTIONS = ("uniform", "normal", "normal_mean", "scaled_logits", "outliers")


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name == "uniform":
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "outliers":
        # One entry of a thousand is ten times as large, as in activations of trained models.
        large = torch.rand(shape, generator=generator, dtype=torch.float64) < 1e-3
        return torch.where(large, 10.0 * values, values)
    return values + 1.0 if name == "normal_mean" else values


def draw(name: str, seed: int, seqlen: int, head_dim: int) -> QKV:
    """Draws q, k and v, each (seqlen, head_dim) in float64, the same on every machine.

    uniform: [0, 1); normal: N(0, 1); normal_mean: N(1, 1); scaled_logits: N(0, 1) with q four times
    as large, for peaked rows; outliers: N(0, 1), one entry of 1000 ten times as large.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (_values(name, (seqlen, head_dim), generator) for _ in range(3))
    return 4.0 * q if name == "scaled_logits" else q, k, v


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
    found = load_tensors(path, "inputs: expected a file of captured tensors")
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
