"""Time and memory of the backward, beside torch's flash backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import limits, standard
from ..contract.attention import Attention
from ..shared.timing import interleaved, peak_memory, summary
from .upstream import Baseline

# batch, seqlen, nheads, head_dim, causal; bf16.
SHAPES = (
    (4, 2048, 32, 64, False),
    (8, 4096, 32, 64, True),
    (4, 4096, 16, 128, False),
    (2, 8192, 16, 128, True),
)
_DEVICE = "cuda"
_QUICK = (SHAPES[0], SHAPES[2])


def measure(attention: Attention, baseline: Baseline | None, quick: bool) -> dict[str, Any]:
    """Measures all shapes; torch's backward adds with atomics, in any order."""
    shapes, repeats = (_QUICK, 5) if quick else (SHAPES, 15)
    rows = [_measure(shape, attention, baseline, repeats) for shape in shapes]
    return {
        "rows": rows,
        "standard": standard.FLASH,
        "criterion": f"median time <= {limits.BACKWARD_TIME_RATIO} x torch's; peak memory "
        f"above inputs and saved tensors <= {limits.MEMORY_RATIO} x torch's + "
        f"{limits.MEMORY_BYTES // 2**20} MiB",
        "passed": all(row["time_passed"] and row["memory_passed"] for row in rows),
    }


def _measure(
    shape: tuple[int, int, int, int, bool],
    attention: Attention,
    baseline: Baseline | None,
    repeats: int,
) -> dict[str, Any]:
    batch, seqlen, nheads, head_dim, causal = shape
    size = (batch, seqlen, nheads, head_dim)
    bf16: dict[str, Any] = {"device": _DEVICE, "dtype": torch.bfloat16}
    leaves = [torch.randn(size, **bf16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(size, **bf16)
    with torch.enable_grad():
        outs = {
            "deterministic": attention.dense(*leaves, causal=causal),
            "standard": standard.square(leaves[0], leaves[1], leaves[2], causal),
        }

    def gradients(out: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    sides = {name: gradients(out) for name, out in outs.items()}
    if baseline is not None:
        with torch.no_grad():
            saved = baseline.forward(leaves[0], leaves[1], leaves[2], causal=causal)
        sides["upstream"] = lambda: baseline.backward(
            dout, leaves[0], leaves[1], leaves[2], *saved, causal=causal
        )
    peaks = {name: peak_memory(run) for name, run in sides.items()}
    times = {n: summary(ms) for n, ms in interleaved(sides, repeats=repeats).items()}
    ratio = times["deterministic"]["median"] / times["standard"]["median"]
    torch.cuda.empty_cache()
    upstream = {}
    if baseline is not None:
        against = times["deterministic"]["median"] / times["upstream"]["median"]
        upstream["ratio_to_upstream"] = round(against, 4)
    return {
        **upstream,
        "shape": f"B{batch} L{seqlen} H{nheads} D{head_dim}{' causal' if causal else ''}",
        "dtype": "bf16",
        "ms": times,
        "time_ratio": round(ratio, 4),
        "time_passed": ratio <= limits.BACKWARD_TIME_RATIO,
        "peak_bytes": peaks,
        "memory_ratio": peaks["deterministic"] / peaks["standard"],
        "memory_passed": limits.memory_passes(peaks["deterministic"], peaks["standard"]),
    }
