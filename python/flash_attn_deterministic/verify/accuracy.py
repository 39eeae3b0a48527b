"""Errors against float64, forward and backward, of ours and of torch's own attention."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import exact, limits, standard
from .contract.attention import Attention
from .contract.call import DTYPES
from .contract.sizes import Config

ROUNDED = "formulas with the kernels' 16-bit roundings, otherwise exact"


@dataclass(frozen=True)
class Shape:
    """A shape of the accuracy checks."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int


_FORWARD = {
    "cuda": (
        Shape("one-key", 2, 1, 1, 4, 4),
        Shape("below-tile", 2, 127, 63, 4, 4),
        Shape("above-tile-mqa", 2, 129, 65, 4, 1),
        Shape("1000-gqa", 2, 1000, 1000, 8, 2),
        Shape("4096-gqa", 1, 4096, 4096, 8, 2),
        Shape("1000-of-4096-mqa", 1, 1000, 4096, 4, 1),
        Shape("decode-4096-gqa", 2, 1, 4096, 8, 2),
        Shape("fewer-keys", 2, 1000, 65, 8, 2),
    ),
    "cpu": (
        Shape("one-key", 2, 1, 1, 4, 4),
        Shape("above-tile-mqa", 2, 129, 65, 4, 1),
        Shape("200-gqa", 2, 200, 200, 4, 2),
        Shape("decode-300", 2, 1, 300, 4, 2),
    ),
}
_BACKWARD = {
    "cuda": (
        Shape("130-mha", 2, 130, 130, 4, 4),
        Shape("1000-gqa", 2, 1000, 1000, 8, 2),
        Shape("2048", 1, 2048, 2048, 4, 4),
    ),
    "cpu": (Shape("130-gqa", 2, 130, 130, 4, 2),),
}


def measure(config: Config, device: str, attention: Attention) -> dict[str, Any]:
    """Measures all shapes of one head dim and dtype on "cpu" or "cuda".

    Returns:
        `rows`, each with the errors of ours, of the standard and of what ours is compared with,
        the ratio, and whether it passed; `criterion` in words.
    """
    against = standard.FLASH if device == "cuda" else ROUNDED
    rows = []
    for causal in (False, True):
        for shape in _FORWARD[device]:
            rows.append(_forward(shape, config, causal, device, attention))
        for shape in _BACKWARD[device]:
            rows += _backward(shape, config, causal, device, attention)
    return {
        "rows": rows,
        "standard": standard.name(device),
        "criterion": f"largest error against float64 <= {limits.ACCURACY_RATIO} x that of "
        f"{against}",
    }


def _draw(shape: Shape, config: Config, device: str) -> list[torch.Tensor]:
    head_dim, dtype = config
    seed = zlib.crc32(f"{shape.name} {head_dim} {dtype}".encode())
    generator = torch.Generator(device).manual_seed(seed)

    def normal(seqlen: int, nheads: int) -> torch.Tensor:
        size = (shape.batch, seqlen, nheads, head_dim)
        return torch.randn(size, generator=generator, device=device).to(DTYPES[dtype])

    q, k = (shape.seqlen_q, shape.nheads), (shape.seqlen_k, shape.nheads_k)
    return [normal(*size) for size in (q, k, k, q)]


@torch.no_grad()
def _forward(
    shape: Shape, config: Config, causal: bool, device: str, attention: Attention
) -> dict[str, Any]:
    q, k, v, _ = _draw(shape, config, device)
    want = [exact.forward(q, k, v, causal, None)]
    ours = [attention.dense(q, k, v, causal=causal)]
    theirs = [standard.forward(q, k, v, causal)]
    rounded = theirs if device == "cuda" else [exact.forward(q, k, v, causal, q.dtype)]
    return _rows(shape, config, causal, "forward", ("out",), want, ours, theirs, rounded)[0]


def _backward(
    shape: Shape, config: Config, causal: bool, device: str, attention: Attention
) -> list[dict[str, Any]]:
    *inputs, dout = _draw(shape, config, device)
    q, k, v = (t.requires_grad_() for t in inputs)
    with torch.enable_grad():
        ours = torch.autograd.grad(attention.dense(q, k, v, causal=causal), (q, k, v), dout)
        theirs = torch.autograd.grad(standard.square(q, k, v, causal), (q, k, v), dout)
    with torch.no_grad():
        want = exact.gradients(q, k, v, dout, causal, None)
        rounded = theirs if device == "cuda" else exact.gradients(q, k, v, dout, causal, dout.dtype)
    names = ("dq", "dk", "dv")
    return _rows(shape, config, causal, "backward", names, want, ours, theirs, rounded)


def _rows(
    shape: Shape,
    config: Config,
    causal: bool,
    direction: str,
    names: Iterable[str],
    want: Iterable[torch.Tensor],
    *sides: Iterable[torch.Tensor],
) -> list[dict[str, Any]]:
    head_dim, dtype = config
    rows = []
    for name, exactly, *results in zip(names, want, *sides, strict=True):
        ours, theirs, against = (errors(result, exactly) for result in results)
        # Smaller errors are chance, not the algorithm.
        floor = torch.finfo(DTYPES[dtype]).eps / 64
        ratio = max(ours["largest"], floor) / max(against["largest"], floor)
        # Beside a standard that is infinitely wrong, any finite error would pass.
        finite = math.isfinite(ours["largest"]) and math.isfinite(against["largest"])
        passed = finite and ratio <= limits.ACCURACY_RATIO
        rows.append(
            {
                "name": f"{direction} {name} {shape.name}{' causal' if causal else ''}",
                "direction": direction,
                "tensor": name,
                "shape": {n: getattr(shape, n) for n in vars(shape) if n != "name"},
                "head_dim": head_dim,
                "dtype": dtype,
                "causal": causal,
                "ours": ours,
                "standard": theirs,
                "against": against,
                "ratio": ratio,
                "passed": passed,
            }
        )
    return rows


def errors(result: torch.Tensor, exactly: torch.Tensor) -> dict[str, float]:
    """Returns the largest and the root mean square error; a NaN is an infinite error."""
    gap = (result.double() - exactly).abs().nan_to_num(math.inf, posinf=math.inf)
    return {"largest": float(gap.max()), "rmse": float(gap.square().mean().sqrt())}
