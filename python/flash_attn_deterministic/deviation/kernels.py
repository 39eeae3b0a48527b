"""The study of real kernels: deviations, the presets against them, run to run, and time."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import reference
from ..errors import ArgumentError
from ..info.build_info import build_info
from ..reference import Formats
from .backends import Backend, ours, usable
from .files import read_json, write_json
from .formats import NumberFormat, parse_format
from .inputs import DISTRIBUTIONS, draw
from .metrics import deviation
from .progress import Progress
from .simulate import golden_attention
from .study import SCHEMA, environment, open_study, stopwatch
from .training.attention import explicit_attention

RESULT_FILE = "kernels.json"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HEADS = 2
CONTROL = "control"
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KernelPlan:
    """What to run: on which device, thinned or not, with how many draws per point."""

    device: str = "cuda"
    quick: bool = False
    seeds: int = 4

    def check(self) -> None:
        """Raises ArgumentError for no draws, or a device that is not there."""
        if self.seeds < 1:
            raise ArgumentError(f"seeds: expected at least 1, got {self.seeds}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(
                "device: expected a CUDA device for cuda, got a machine without one; "
                "--device cpu runs what a CPU has"
            )

    @property
    def small(self) -> bool:
        return self.quick or self.device == "cpu"

    @property
    def seqlens(self) -> tuple[int, ...]:
        return (64, 128, 256) if self.small else (256, 512, 1024, 2048, 4096, 8192)

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (64,) if self.small else (64, 128)

    def inputs_of(self, name: str, head_dim: int) -> tuple[str, ...]:
        """All distributions for bfloat16 at the first head_dim, two for the rest."""
        whole = name == "bf16" and head_dim == self.head_dims[0] and not self.small
        return DISTRIBUTIONS if whole else ("uniform", "normal")


def run_kernels(plan: KernelPlan, folder: Path, force: bool = False) -> dict[str, Any]:
    """Runs the study and writes its kernels.json.

    Returns:
        Its content: {"forward": [...], "agreement": [...], "backward": [...], "run_to_run": [...],
        "speed": [...], "missing": {...}, ...}; each list has one dict per point.

    Raises:
        ArgumentError: no such device, or the folder holds another study.
    """
    plan.check()
    key = open_study(folder, "kernels", asdict(plan), force)
    parts: dict[str, Callable[[KernelPlan], list[dict[str, Any]]]] = {
        "forward": forward_deviation,
        "agreement": agreement,
        "backward": backward_deviation,
        "run_to_run": run_to_run,
        "speed": speed,
    }
    store = folder / "cells"
    if (folder / RESULT_FILE).exists():
        # Finished: a new run measures anew, perhaps another wheel. Only what broke off is resumed.
        for name in parts:
            (store / f"{name}.json").unlink(missing_ok=True)
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    with Progress("kernels", len(parts)) as progress, warnings.catch_warnings():
        # torch's warning that a kernel of the backward is not deterministic: that is the subject.
        warnings.simplefilter("ignore")
        for name, part in parts.items():
            try:
                results[name], seconds[name] = _part(store / f"{name}.json", part, plan)
            except Exception as error:  # the other parts are still worth their time on a GPU
                failed[name] = error
            progress.advance(name)
    if failed:
        name, first = next(iter(failed.items()))
        raise RuntimeError(
            f"{', '.join(failed)} failed, the rest is kept in {store}; {name}: {first}"
        ) from first
    missing = {
        direction: usable(plan.device, torch.bfloat16, 64, direction == "backward")[1]
        for direction in ("forward", "backward")
    }
    value = {
        "kind": "kernels",
        "schema": SCHEMA,
        "hash": key,
        "configuration": asdict(plan),
        "environment": environment(plan.device),
        "seconds": seconds,
        "missing": missing,
        **results,
    }
    write_json(folder / RESULT_FILE, value)
    return value


def _part(
    path: Path, part: Callable[[KernelPlan], list[dict[str, Any]]], plan: KernelPlan
) -> tuple[list[dict[str, Any]], float]:
    """Runs a part of the study, or reads what it gave before the study broke off."""
    if not path.exists():
        with stopwatch() as taken:
            points = part(plan)
        write_json(path, {"points": points, "seconds": taken[0]})
    saved = read_json(path)
    return saved["points"], saved["seconds"]


def read_kernels(path: Path) -> dict[str, Any]:
    """Reads kernels.json.

    Raises:
        ArgumentError: the file is no result of this study.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != "kernels":
        raise ArgumentError(f"{path}: expected the result of a study of kernels")
    return value


def _tensors(plan: KernelPlan, inputs: str, seqlen: int, head_dim: int, dtype: torch.dtype) -> QKV:
    """Draws q, k and v (seeds, heads, seqlen, head_dim)."""
    drawn = [draw(inputs, seed, seqlen * _HEADS, head_dim) for seed in range(plan.seeds)]
    shape = (plan.seeds, _HEADS, seqlen, head_dim)
    q, k, v = (torch.stack(part).view(shape) for part in zip(*drawn, strict=True))
    return tuple(tensor.to(plan.device, dtype) for tensor in (q, k, v))  # type: ignore[return-value]


def forward_deviation(plan: KernelPlan) -> list[dict[str, Any]]:
    """Deviation of each backend's output from float64, over formats, inputs and lengths."""
    points = []
    for name, dtype in _DTYPES.items():
        for head_dim in plan.head_dims:
            backends, _ = usable(plan.device, dtype, head_dim)
            for inputs in plan.inputs_of(name, head_dim):
                for seqlen in plan.seqlens:
                    q, k, v = _tensors(plan, inputs, seqlen, head_dim, dtype)
                    golden = golden_attention(q, k, v, head_dim**-0.5)
                    for backend, function in backends.items():
                        found = deviation(function(q, k, v), golden, parse_format(name))
                        points.append(
                            {"backend": backend, "format": name, "inputs": inputs,
                             "seqlen": seqlen, "head_dim": head_dim, "result": found}
                        )  # fmt: skip
    return points


def agreement(plan: KernelPlan) -> list[dict[str, Any]]:
    """How often the presets give the very bits of this package's kernels, or a neighbour of them.

    `ours` runs on the device, the preset on the CPU. Sums in another order move a P to its
    neighbour now and then, and outputs near 0 have small gaps: neither share is quite 1. How far
    from 1 a wrong model would be, the control shows: P in float32, all else the same.
    """
    points = []
    seqlen = 128 if plan.small else 1024
    for name, dtype in _DTYPES.items():
        for head_dim in plan.head_dims:
            if "ours" not in usable(plan.device, dtype, head_dim)[0]:
                continue
            for inputs in ("uniform", "normal"):
                q, k, v = (t[:1] for t in _tensors(plan, inputs, seqlen, head_dim, dtype))
                tree = 64 if plan.small else 256
                for preset, split_size in (("kernel", 0), ("tree", tree), (CONTROL, 0)):
                    real = ours(q, k, v, split_size=split_size).cpu()
                    q_rows, k_rows, v_rows = (t.cpu().transpose(1, 2) for t in (q, k, v))
                    simulated, _ = reference.attention(
                        q_rows,
                        k_rows,
                        v_rows,
                        split_size=split_size,
                        block_n=build_info().tile(head_dim).block_n,
                        formats=Formats(probs=torch.float32 if preset == CONTROL else None),
                    )
                    share = ulp_agreement(simulated.transpose(1, 2), real, parse_format(name))
                    points.append(
                        {"preset": preset, "format": name, "inputs": inputs, "seqlen": seqlen,
                         "head_dim": head_dim, "split_size": split_size, **share}
                    )  # fmt: skip
    return points


def ulp_agreement(
    simulated: torch.Tensor, real: torch.Tensor, number_format: NumberFormat
) -> dict[str, float]:
    """Returns the shares of elements that are equal and within one gap, and the largest distance.

    A gap is the format's at the larger of the two magnitudes.
    """
    left, right = simulated.double(), real.double()
    gaps = (left - right).abs() / number_format.ulp(torch.maximum(left.abs(), right.abs()))
    return {
        "equal": float((gaps == 0).double().mean()),
        "within_1_ulp": float((gaps <= 1).double().mean()),
        "largest_ulp": float(gaps.max()),
    }


def _gradients(
    function: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> QKV:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    grads = torch.autograd.grad(function(*leaves), leaves, dout)
    return grads[0], grads[1], grads[2]


def _golden_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> QKV:
    """float64 gradients, one sequence at a time."""
    parts = []
    for index in range(len(q)):
        wide = (q[index].double(), k[index].double(), v[index].double())
        parts.append(_gradients(explicit_attention, *wide, dout[index].double()))
    dq, dk, dv = (torch.stack(part) for part in zip(*parts, strict=True))
    return dq, dk, dv


def _dout(like: torch.Tensor) -> torch.Tensor:
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(99))
    return values.to(like.device, like.dtype)


def backward_deviation(plan: KernelPlan) -> list[dict[str, Any]]:
    """Deviation of dq, dk and dv from float64."""
    points = []
    for name, dtype in _DTYPES.items():
        for head_dim in plan.head_dims:
            backends, _ = usable(plan.device, dtype, head_dim, backward=True)
            for inputs in ("uniform", "normal"):
                for seqlen in plan.seqlens[-4:-1]:
                    q, k, v = _tensors(plan, inputs, seqlen, head_dim, dtype)
                    dout = _dout(q)
                    golden = _golden_gradients(q, k, v, dout)
                    for backend, function in backends.items():
                        found = _gradients(function, q, k, v, dout)
                        for gradient, actual, exact in zip(
                            ("dq", "dk", "dv"), found, golden, strict=True
                        ):
                            result = deviation(actual, exact, parse_format(name))
                            points.append(
                                {"backend": backend, "gradient": gradient, "format": name,
                                 "inputs": inputs, "seqlen": seqlen, "head_dim": head_dim,
                                 "result": result}
                            )  # fmt: skip
    return points


def run_to_run(plan: KernelPlan) -> list[dict[str, Any]]:
    """How far repeats of the same call are from the first: the noise floor."""
    points = []
    repeats = 3 if plan.small else 10
    backends, _ = usable(plan.device, torch.bfloat16, 64)
    with_backward, _ = usable(plan.device, torch.bfloat16, 64, backward=True)
    for seqlen in plan.seqlens[-3:-1]:
        q, k, v = _tensors(plan, "normal", seqlen, 64, torch.bfloat16)
        dout = _dout(q)
        for backend, function in backends.items():
            if backend in with_backward:
                calls = [_gradients(function, q, k, v, dout) for _ in range(repeats)]
                outputs = dict(zip(("dq", "dk", "dv"), zip(*calls, strict=True), strict=True))
            else:
                outputs = {}
            outputs["out"] = tuple(function(q, k, v) for _ in range(repeats))
            for output, values in outputs.items():
                wide = [value.double() for value in values]
                floor = max(float((value - wide[0]).abs().max()) for value in wide)
                same = all(
                    torch.equal(value.view(torch.int16), values[0].view(torch.int16))
                    for value in values
                )
                points.append(
                    {"backend": backend, "output": output, "seqlen": seqlen,
                     "repeats": repeats, "max_difference": floor, "same_bits": same,
                     "relative": floor / float(wide[0].abs().max())}
                )  # fmt: skip
    return points


def speed(plan: KernelPlan) -> list[dict[str, Any]]:
    """Time of a training step of the text-to-image transformer, by attention."""
    from .training.model import Drawings, Size

    sizes = {"tiny": Size(16, 4, 32, 2, 2, 2, 0)}
    if not plan.small:
        sizes = {
            "1030 tokens, head_dim 64": Size(128, 4, 768, 12, 12, 8, 0),
            "4102 tokens, head_dim 64": Size(256, 4, 768, 12, 12, 2, 0),
        }
    points: list[dict[str, Any]] = []
    for label, size in sizes.items():
        head_dim = size.width // size.heads
        backends, _ = usable(plan.device, torch.bfloat16, head_dim, backward=True)
        for name, function in backends.items():
            if name in ("torch_math", "ours_nondeterministic"):
                continue
            torch.manual_seed(0)
            workload = Drawings(size)
            model = workload.model(function).to(plan.device)
            optimizer = torch.optim.AdamW(model.parameters())

            def step(model: Any = model, optimizer: Any = optimizer, load: Any = workload) -> None:
                generator = torch.Generator().manual_seed(0)
                with torch.autocast(plan.device, dtype=torch.bfloat16):
                    loss = load.loss(model, generator)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            times = _times(step, plan.device, warm=3, count=3 if plan.small else 10)
            points.append(
                {"backend": name, "model": label, "milliseconds": statistics.median(times),
                 "all": times}
            )  # fmt: skip
    for point in points:
        slow = [p for p in points if p["model"] == point["model"] and p["backend"] == "baseline"]
        if slow:
            point["speedup"] = slow[0]["milliseconds"] / point["milliseconds"] - 1
    return points


def _times(step: Callable[[], None], device: str, warm: int, count: int) -> list[float]:
    times = []
    for number in range(warm + count):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= warm:
            times.append((time.perf_counter() - start) * 1000)
    return times
