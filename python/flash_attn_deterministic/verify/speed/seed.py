"""The tests of the prototype that this project replaced, on its configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import limits, standard
from ..contract.attention import Attention
from ..shared.bits import difference
from ..shared.timing import interleaved, peak_memory, summary
from .upstream import Baseline

# As that prototype reported them, on an A100 with splits of 512 tokens. For reference only.
REFERENCE = {
    "gpu": "A100",
    "split_size": 512,
    "time_ratio": 2.2,
    "memory_ratio": 18.7,
    "build_minutes": 75,
    "library_mb": 390.9,
}
SPLIT = 512  # the prototype's

_DEVICE = "cuda"


class Shape(NamedTuple):
    """Self-attention without a mask, fp16."""

    batch: int
    seqlen: int
    nheads: int = 32
    head_dim: int = 64

    @property
    def name(self) -> str:
        """Returns e.g. "B8 L4096 H32 D64"."""
        return f"B{self.batch} L{self.seqlen} H{self.nheads} D{self.head_dim}"


MEMORY = Shape(4, 2048)
PERFORMANCE = Shape(8, 4096)
SCALING = (Shape(4, 2048), Shape(8, 4096), Shape(16, 8192))
_TIME_LIMIT = f"median time <= {limits.FORWARD_TIME_RATIO} x torch's"
_MEMORY_LIMIT = (
    f"peak memory above the inputs <= {limits.MEMORY_RATIO} x torch's + "
    f"{limits.MEMORY_BYTES // 2**20} MiB"
)


def memory(attention: Attention, baseline: Baseline | None, quick: bool) -> dict[str, Any]:
    """Measures the peak memory of both sides above the inputs."""
    row = _measure(MEMORY, attention, baseline, repeats=0)
    return _data([row], _MEMORY_LIMIT, row["memory_passed"])


def performance(attention: Attention, baseline: Baseline | None, quick: bool) -> dict[str, Any]:
    """Measures the time of both sides."""
    row = _measure(PERFORMANCE, attention, baseline, repeats=10 if quick else 30)
    return _data([row], _TIME_LIMIT, row["time_passed"])


def scaling(attention: Attention, baseline: Baseline | None, quick: bool) -> dict[str, Any]:
    """Measures both at growing sizes."""
    rows = [_measure(shape, attention, baseline, repeats=5 if quick else 20) for shape in SCALING]
    passed = all(row["time_passed"] and row["memory_passed"] for row in rows)
    return _data(rows, f"{_TIME_LIMIT}; {_MEMORY_LIMIT}", passed)


def _data(rows: list[dict[str, Any]], criterion: str, passed: bool) -> dict[str, Any]:
    return {"rows": rows, "seed": REFERENCE, "criterion": criterion, "passed": passed}


def batch_invariance(
    attention: Attention, baseline: Baseline | None, device: str
) -> dict[str, Any]:
    """Compares a batch of 8 with two of 4, ours and torch's."""
    shape = PERFORMANCE if device == "cuda" else Shape(8, 128, 4)
    q, k, v = _draw(shape, device)
    halves = slice(0, 4), slice(4, 8)
    data: dict[str, Any] = {
        "rows": [],
        "criterion": "all bits of 8 and of 4 + 4 equal, all numbers finite",
    }
    sides: dict[str, Callable[..., torch.Tensor]] = {
        "deterministic": attention.dense,
        "standard": lambda q, k, v: standard.square(q, k, v, False),
    }
    if baseline is not None:
        sides["upstream"] = lambda q, k, v: baseline.forward(q, k, v)[0]
    for name, run in sides.items():
        with torch.no_grad():
            whole = run(q, k, v)
            parts = torch.cat([run(q[half], k[half], v[half]) for half in halves])
        found = difference(whole, parts)
        finite = bool(whole.isfinite().all())
        words = "equal bit for bit" if found is None else found.words
        data["rows"].append(
            {
                "side": name,
                "shape": shape.name,
                "differing": 0 if found is None else found.differing,
                "elements": whole.numel(),
                "largest_difference": float((whole.float() - parts.float()).abs().max()),
                "finite": finite,
                "words": words if finite else f"{words}; not all numbers are finite",
            }
        )
        # A NaN has the bits of a NaN: equal bits alone would let it pass.
        data.setdefault("passed", found is None and finite)
    data["standard"] = standard.name(device)
    return data


def _draw(shape: Shape, device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(shape.batch * 100_003 + shape.seqlen)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    return [torch.randn(tuple(shape), **options).half() for _ in range(3)]


@torch.no_grad()
def _measure(
    shape: Shape, attention: Attention, baseline: Baseline | None, repeats: int
) -> dict[str, Any]:
    q, k, v = _draw(shape, _DEVICE)
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "standard": lambda: standard.square(q, k, v, False),
        "deterministic": lambda: attention.dense(q, k, v),
        f"deterministic_{SPLIT}": lambda: attention.dense(q, k, v, split_size=SPLIT),
    }
    if baseline is not None:
        sides["upstream"] = lambda: baseline.forward(q, k, v)[0]
    peaks = {name: peak_memory(run) for name, run in sides.items()}
    row: dict[str, Any] = {
        "shape": shape.name,
        "dtype": "fp16",
        "standard": standard.FLASH,
        "peak_bytes": peaks,
        "memory_ratio": {n: p / peaks["standard"] for n, p in peaks.items() if n != "standard"},
        "memory_passed": limits.memory_passes(peaks["deterministic"], peaks["standard"]),
    }
    if repeats:
        times = {n: summary(ms) for n, ms in interleaved(sides, repeats=repeats).items()}
        base = times["standard"]["median"]
        row["ms"] = times
        row["time_ratio"] = {
            n: round(t["median"] / base, 4) for n, t in times.items() if n != "standard"
        }
        if baseline is not None:
            ours = times["deterministic"]["median"]
            row["ratio_to_upstream"] = round(ours / times["upstream"]["median"], 4)
        row["time_passed"] = row["time_ratio"]["deterministic"] <= limits.FORWARD_TIME_RATIO
    torch.cuda.empty_cache()
    return row
