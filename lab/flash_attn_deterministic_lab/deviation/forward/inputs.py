"""What q, k and v of the microbenchmark are drawn from."""

from __future__ import annotations

import torch

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DISTRIBUTIONS = {  # with what reports call them
    "uniform": "uniform [0, 1)",
    "normal": "normal (0, 1)",
    "normal_mean": "normal (1, 1)",
    "scaled_logits": "normal, 4 q",
    "outliers": "normal, outliers",
}


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
