"""The study of real kernels: deviation from float64, and repeats."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...attentions.named import first_line_or_kind
from ...cli import check_device
from ...errors import ArgumentError
from ...shared.bits import difference
from ..attentions.masks import Call
from ..attentions.registry import Attention, find_attention, gradients_of
from ..forward.inputs import DISTRIBUTIONS, draw
from ..numbers.formats import DTYPES, parse_format
from ..numbers.metrics import deviation
from ..study.files import new_result, write_result

COMPARED = ("ours", "ours-atomics", "ours+residual", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient",
            "sdpa-math", "explicit")  # fmt: skip
_HEADS = 2
Tensors = tuple[torch.Tensor, ...]
Run = Callable[[Attention, Call, torch.Tensor], Tensors]
Found = list[dict[str, Any]]  # one for each point


@dataclass(frozen=True)
class KernelPlan:
    """What to run: on which device, thinned or not, with how many draws per point."""

    device: str = "cuda"
    quick: bool = False
    seeds: int = 4

    @property
    def small(self) -> bool:
        return self.quick or self.device == "cpu"

    @property
    def seqlens(self) -> tuple[int, ...]:
        return (64, 128, 256) if self.small else (256, 512, 1024, 2048, 4096, 8192)

    def points(self, seqlens: Sequence[int]) -> Iterator[tuple[dict[str, Any], Call]]:
        """Yields formats, head dimensions, inputs and lengths, with tensors of each.

        All distributions for bfloat16 at head_dim 64, two for the rest.
        """
        for name in ("bf16", "fp16"):
            for head_dim in (64,) if self.small else (64, 128):
                whole = name == "bf16" and head_dim == 64 and not self.small
                for inputs in DISTRIBUTIONS if whole else ("uniform", "normal"):
                    for seqlen in seqlens:
                        where = {"format": name, "inputs": inputs, "seqlen": seqlen}
                        call = self.call(inputs, seqlen, head_dim, name)
                        yield {**where, "head_dim": head_dim}, call

    def call(self, inputs: str, seqlen: int, head_dim: int, name: str) -> Call:
        """Draws q, k and v (seeds, heads, seqlen, head_dim), rounded once to the format."""
        drawn = [draw(inputs, seed, seqlen * _HEADS, head_dim) for seed in range(self.seeds)]
        shape = (self.seeds, _HEADS, seqlen, head_dim)
        q, k, v = (
            parse_format(name).round(torch.stack(part)).view(shape).to(self.device, DTYPES[name])
            for part in zip(*drawn, strict=True)
        )
        return Call(q, k, v)


def drawn_dout(like: torch.Tensor) -> torch.Tensor:
    """Returns dO, N(0, 1), the same on every machine."""
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(99))
    return values.to(like.device, like.dtype)


def _output(attention: Attention, call: Call, dout: torch.Tensor) -> Tensors:
    return (attention(call.q, call.k, call.v),)


# What each direction computes, and how, of an attention, a call and dO.
DIRECTIONS: dict[str, tuple[tuple[str, ...], Run]] = {
    "forward": (("out",), _output),
    "backward": (("dq", "dk", "dv"), gradients_of),
}


def each_that_can(
    missing: dict[str, str], run: Run, call: Call, repeats: int = 1
) -> Iterator[tuple[str, list[Tensors]]]:
    """Yields each attention's name and its results; `missing` gets why one has none."""
    dout = drawn_dout(call.q)
    for name in COMPARED:
        try:
            attention = find_attention(name)
            found = [run(attention, call, dout) for _ in range(repeats)]
        except Exception as error:  # kernels raise what they raise
            missing.setdefault(name, first_line_or_kind(error))
        else:
            yield name, found


def deviations(plan: KernelPlan, direction: str, missing: dict[str, str]) -> Found:
    """Deviation of each attention from float64, over formats, inputs and lengths.

    With uniform inputs D decides about dq, dk and dv (`emulate.gradients`).
    """
    points = []
    names, run = DIRECTIONS[direction]
    backward = direction == "backward"
    for where, call in plan.points(plan.seqlens[-4:-1] if backward else plan.seqlens):
        dout = drawn_dout(call.q).double()
        golden = run(find_attention("exact"), call.to(torch.float64), dout)
        for backend, (found,) in each_that_can(missing, run, call):
            for name, actual, true in zip(names, found, golden, strict=True):
                what = {"gradient": name} if backward else {}
                result = deviation(actual, true, parse_format(where["format"]))
                points.append({**where, "backend": backend, **what, "result": result})
    return points


def run_to_run(plan: KernelPlan, direction: str, missing: dict[str, str]) -> Found:
    """Repeats each attention on one set of tensors."""
    points = []
    names, run = DIRECTIONS[direction]
    repeats = 3 if plan.small else 10
    for seqlen in plan.seqlens[-3:-1]:
        call = plan.call("normal", seqlen, 64, "bf16")
        for backend, calls in each_that_can(missing, run, call, repeats):
            for output, values in zip(names, zip(*calls, strict=True), strict=True):
                same = all(difference(value, values[0]) is None for value in values)
                where = {"backend": backend, "output": output, "seqlen": seqlen}
                points.append({**where, "repeats": repeats, "same_bits": same})
    return points


def run_kernels(plan: KernelPlan, folder: Path) -> dict[str, Any]:
    """Runs the study and writes its kernels.json, after each part.

    Returns:
        Its content: {"forward": [...], "backward": [...], "run_to_run": [...], "missing":
        {direction: {attention: why it has no numbers, or not all}}, ...}; each list has one dict
        per point.

    Raises:
        ArgumentError: no draws.
        UnavailableError: no such device.
    """
    if plan.seeds < 1:
        raise ArgumentError(f"seeds: expected at least 1, got {plan.seeds}")
    check_device(plan.device)
    begin = time.monotonic()
    value: dict[str, Any] = {
        **new_result("kernels", asdict(plan), plan.device),
        "missing": {name: {} for name in DIRECTIONS}, "run_to_run": [],
        **{name: [] for name in DIRECTIONS},
    }  # fmt: skip
    with warnings.catch_warnings():
        # Why a backend does not take a call, and that a kernel of the backward is not
        # deterministic: both are results here.
        warnings.simplefilter("ignore")
        for direction, missing in value["missing"].items():
            value[direction] = deviations(plan, direction, missing)
            value["run_to_run"] += run_to_run(plan, direction, missing)
            value["seconds"] = time.monotonic() - begin
            write_result(folder, value)
    return value


def failures(value: dict[str, Any]) -> list[str]:
    """Names where our kernels raised at some points and not at all: others need not take all."""
    return [
        f"{direction}: {name}: {why}"
        for direction, missing in value["missing"].items()
        for name, why in missing.items()
        if name.startswith("ours") and any(point["backend"] == name for point in value[direction])
    ]
