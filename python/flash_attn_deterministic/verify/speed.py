"""Time and memory beside torch's flash attention, and beside the last release.

What a call may take is bound by what the last release took, over torch's in the same process: a
constant would let a slow change through, or stop at a slower GPU. `last_release.json` has its
ratios, by model of GPU; `python -m flash_attn_deterministic.verify.speed verification.json` takes
those of a report.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch.nn import functional

from ..build_info import build_info
from . import standard
from .contract.call import DTYPES, Attention
from .shared.files import json_text, write_files
from .shared.timing import interleaved, peak_memory, rotation, summary, time_graphs

LAST = Path(__file__).with_name("last_release.json")
_DEVICE = "cuda"
TIME_RATIO = 1.08  # over the last release's ratio to torch
MEMORY_RATIO = 1.05  # peak above the inputs, over torch's
_MEMORY_BYTES = 2**20  # on top of that
_SIGMAS = 2.0  # of the medians' own errors


@dataclass(frozen=True)
class Shape:
    """A call that is timed."""

    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    head_dim: int
    causal: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Returns e.g. "B8 L4096 H32/8 D64 causal bf16"."""
        heads = f"{self.nheads}/{self.nheads_k}" if self.nheads > self.nheads_k else self.nheads
        words = [f"B{self.batch} L{self.seqlen} H{heads} D{self.head_dim}"]
        return " ".join([*words, *["causal"] * self.causal, self.dtype])


SHAPES = {
    "forward": (
        Shape(4, 2048, 32, 32, 64, dtype="fp16"),
        Shape(8, 4096, 32, 32, 64, dtype="fp16"),
        Shape(16, 8192, 32, 32, 64, dtype="fp16"),
    ),
    "decode": (
        Shape(1, 4096, 32, 8, 128),
        Shape(8, 4096, 32, 8, 128),
        Shape(64, 4096, 32, 8, 128),
        Shape(1, 32_768, 32, 8, 128),
        Shape(8, 32_768, 32, 8, 128),
        Shape(64, 16_384, 32, 8, 128),
        Shape(8, 8192, 32, 8, 64),
    ),
    "backward": (
        Shape(4, 2048, 32, 32, 64),
        Shape(4, 4096, 16, 16, 128),
        Shape(8, 4096, 32, 32, 64, causal=True),
        Shape(2, 8192, 16, 16, 128, causal=True),
    ),
}
_QUICK = {"forward": 2, "decode": 3, "backward": 2}  # how many of the shapes
_REPEATS = {"forward": 20, "decode": 15, "backward": 15}


def measure(section: str, attention: Attention, quick: bool) -> dict[str, Any]:
    """Measures all shapes of "forward", "decode" or "backward".

    Returns:
        `rows`, the geometric mean of the ratios of times, whether all passed, and the criterion.
    """
    shapes = SHAPES[section][: _QUICK[section]] if quick else SHAPES[section]
    repeats = _REPEATS[section] // 3 if quick else _REPEATS[section]
    last = last_ratios(section)
    rows = [_row(section, shape, attention, repeats, last.get(shape.name)) for shape in shapes]
    words = f"median time over torch's <= {TIME_RATIO} x the last release's"
    words += ", and what its own noise explains"
    memory = f"peak memory above the inputs <= {MEMORY_RATIO} x torch's + 1 MiB"
    return {
        "rows": rows,
        "standard": standard.FLASH,
        "geometric_mean": round(geometric_mean(row["time_ratio"] for row in rows), 4),
        "criterion": words if section == "decode" else f"{words}; {memory}",
        "passed": all(row["time_passed"] and row["memory_passed"] for row in rows),
    }


def last_ratios(section: str) -> dict[str, float]:
    """Returns times of the last release over torch's, by shape.

    None for another model of GPU, and for a wheel of PTX alone, which lacks the kernels for Hopper.
    """
    if all(name.endswith("-virtual") for name in build_info().architectures):
        return {}
    # Not by compute capability: an H200 reads its memory faster than an H100.
    found = json.loads(LAST.read_text(encoding="utf-8")).get(torch.cuda.get_device_name())
    return found["ratios"][section] if found else {}


def limit_of(last: float | None, times: dict[str, dict[str, float]], repeats: int) -> float | None:
    """Returns the highest ratio that passes beside the last release's; None: there is none.

    The medians' own noise, from p10 and p90 of both sides and the number of repeats, is on top.
    """
    if last is None:
        return None
    squares = 0.0
    for side in ("ours", "standard"):
        # From deciles to a standard deviation, and to that of a median, of a normal distribution.
        deviation = (times[side]["p90"] - times[side]["p10"]) / 2.563
        squares += (1.2533 * deviation / times[side]["median"]) ** 2 / repeats
    return last * TIME_RATIO * (1 + _SIGMAS * math.sqrt(squares))


def _row(
    section: str, shape: Shape, attention: Attention, repeats: int, last: float | None
) -> dict[str, Any]:
    times, peaks = _MEASURES[section](shape, attention, repeats)
    ratio = times["ours"]["median"] / times["standard"]["median"]
    limit = limit_of(last, times, repeats)
    row: dict[str, Any] = {
        "shape": shape.name,
        "ms": times,
        "time_ratio": round(ratio, 4),
        "last_ratio": last,
        "limit": None if limit is None else round(limit, 4),
        # A ratio that is no number passes nothing.
        "time_passed": math.isfinite(ratio) and (limit is None or ratio <= limit),
        "memory_passed": True,
    }
    if peaks:
        row["peak_bytes"] = peaks
        row["memory_ratio"] = peaks["ours"] / peaks["standard"]
        row["memory_passed"] = peaks["ours"] <= MEMORY_RATIO * peaks["standard"] + _MEMORY_BYTES
    if "copy" in times:
        row["ratio_to_floor"] = round(2 * times["ours"]["median"] / times["copy"]["median"], 4)
    torch.cuda.empty_cache()
    return row


Measured = tuple[dict[str, dict[str, float]], dict[str, int]]


def _draw(shape: Shape, count: int) -> list[torch.Tensor]:
    size = (shape.batch, shape.seqlen, shape.nheads, shape.head_dim)
    return [torch.randn(size, device=_DEVICE, dtype=DTYPES[shape.dtype]) for _ in range(count)]


def _sides(sides: dict[str, Callable[[], object]], repeats: int) -> Measured:
    peaks = {name: peak_memory(run) for name, run in sides.items()}
    return {n: summary(ms) for n, ms in interleaved(sides, repeats=repeats).items()}, peaks


@torch.no_grad()
def _forward(shape: Shape, attention: Attention, repeats: int) -> Measured:
    q, k, v = _draw(shape, 3)
    sides: dict[str, Callable[[], object]] = {
        "standard": lambda: standard.square(q, k, v, shape.causal),
        "ours": lambda: attention.dense(q, k, v, causal=shape.causal),
    }
    return _sides(sides, repeats)


def _backward(shape: Shape, attention: Attention, repeats: int) -> Measured:
    """Torch's backward adds with atomics, in any order."""
    *leaves, dout = _draw(shape, 4)
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    with torch.enable_grad():
        outs = {
            "ours": attention.dense(q, k, v, causal=shape.causal),
            "standard": standard.square(q, k, v, shape.causal),
        }
    sides: dict[str, Callable[[], object]] = {
        name: functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        for name, out in outs.items()
    }
    return _sides(sides, repeats)


@torch.no_grad()
def _decode(shape: Shape, attention: Attention, repeats: int) -> Measured:
    """Times steps through CUDA graphs, and a copy of the cache: it reads and writes."""
    size = (shape.batch, shape.seqlen, shape.nheads_k, shape.head_dim)
    sets, calls = rotation(4 * math.prod(size))
    options: dict[str, Any] = {"device": _DEVICE, "dtype": DTYPES[shape.dtype]}
    rows = (shape.batch, 1, shape.nheads, shape.head_dim)
    q = [torch.randn(rows, **options) for _ in range(sets)]
    kv = [torch.randn((2, *size), **options) for _ in range(sets)]
    copies = [torch.empty_like(t) for t in kv]

    def sdpa(i: int) -> torch.Tensor:
        query, key, value = (t.transpose(1, 2) for t in (q[i], kv[i][0], kv[i][1]))
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    steps: dict[str, Callable[[int], object]] = {
        "ours": lambda i: attention.kvcache(q[i], kv[i][0], kv[i][1]),
        "standard": sdpa,
        "copy": lambda i: copies[i].copy_(kv[i]),
    }
    with standard.flash_only(_DEVICE):
        timer = functools.partial(interleaved, repeats=repeats)
        return time_graphs(steps, sets, calls, timer), {}


_MEASURES = {"forward": _forward, "backward": _backward, "decode": _decode}


def release(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what last_release.json holds of a report of verify, by model of GPU."""
    machine = report["environment"]
    ratios = {
        section["id"]: {row["shape"]: row["time_ratio"] for row in section["data"]["rows"]}
        for section in report["sections"]
        if section["id"] in SHAPES
    }
    own = {
        "version": report["installed"]["version"],
        "date": report["started"][:10],
        **{name: machine[name] for name in ("driver", "torch")},
        "wheel": report["wheel"],
        "ratios": ratios,
    }
    return {machine["gpu"]: own}


if __name__ == "__main__":
    content = json.loads(LAST.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        content |= release(json.loads(Path(name).read_text(encoding="utf-8")))
    write_files(LAST.parent, {LAST.name: json_text(content)})
