"""Decode steps through CUDA graphs, beside torch's flash backend and the time to read the cache."""

from __future__ import annotations

import functools
from statistics import geometric_mean
from typing import Any

import torch
from torch.nn import functional

from .. import limits, standard
from ..contract.attention import Attention
from ..shared.timing import Step, interleaved, rotation, time_graphs
from .upstream import Baseline

# batch, seqlen, nheads, nheads_k, head_dim; bf16, one query for each sequence.
SHAPES = (
    (1, 4096, 32, 8, 128),
    (8, 4096, 32, 8, 128),
    (64, 4096, 32, 8, 128),
    (1, 32_768, 32, 8, 128),
    (8, 32_768, 32, 8, 128),
    (64, 16_384, 32, 8, 128),
    (8, 8192, 32, 8, 64),
)
_DEVICE = "cuda"
_QUICK = SHAPES[:3]


def measure(attention: Attention, baseline: Baseline | None, quick: bool) -> dict[str, Any]:
    """Measures all shapes.

    Returns:
        `rows`, the geometric mean of the ratios, whether it passed, and the criterion in words.
    """
    shapes, repeats = (_QUICK, 5) if quick else (SHAPES, 15)
    rows = [_measure(shape, attention, baseline, repeats) for shape in shapes]
    torch.cuda.empty_cache()
    mean = geometric_mean(row["time_ratio"] for row in rows)
    return {
        "rows": rows,
        "standard": standard.FLASH,
        "geometric_mean": round(mean, 4),
        "criterion": "geometric mean of the median times over torch's <= "
        f"{limits.DECODE_TIME_RATIO}",
        "passed": mean <= limits.DECODE_TIME_RATIO,
    }


@torch.no_grad()
def _measure(
    shape: tuple[int, int, int, int, int],
    attention: Attention,
    baseline: Baseline | None,
    repeats: int,
) -> dict[str, Any]:
    batch, seqlen, nheads, nheads_k, head_dim = shape
    sets, calls = rotation(4 * batch * seqlen * nheads_k * head_dim)
    bf16: dict[str, Any] = {"device": _DEVICE, "dtype": torch.bfloat16}
    q = [torch.randn((batch, 1, nheads, head_dim), **bf16) for _ in range(sets)]
    kv = [torch.randn((2, batch, seqlen, nheads_k, head_dim), **bf16) for _ in range(sets)]
    copies = [torch.empty_like(t) for t in kv]

    def sdpa(i: int) -> torch.Tensor:
        query, key, value = (t.transpose(1, 2) for t in (q[i], kv[i][0], kv[i][1]))
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    steps: dict[str, Step] = {
        "deterministic": lambda i: attention.kvcache(q[i], kv[i][0], kv[i][1]),
        "standard": sdpa,
        "copy": lambda i: copies[i].copy_(kv[i]),
    }
    if baseline is not None:
        steps["upstream"] = lambda i: baseline.forward(q[i], kv[i][0], kv[i][1])[0]
    with standard.flash_only(_DEVICE):
        times = time_graphs(steps, sets, calls, functools.partial(interleaved, repeats=repeats))
    ours, theirs, copy = (times[n]["median"] for n in ("deterministic", "standard", "copy"))
    upstream = {}
    if baseline is not None:
        upstream["ratio_to_upstream"] = round(ours / times["upstream"]["median"], 4)
    return {
        **upstream,
        "shape": f"B{batch} L{seqlen} H{nheads}/{nheads_k} D{head_dim}",
        "dtype": "bf16",
        "ms": times,
        "floor_ms": copy / 2,  # a copy reads and writes
        "time_ratio": round(ours / theirs, 4),
        "ratio_to_floor": round(ours / (copy / 2), 4),
    }
