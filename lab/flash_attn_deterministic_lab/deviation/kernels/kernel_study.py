"""The study of real kernels: deviation from float64, and repeats."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...attentions.named import kind_and_line
from ...cli import check_device
from ...errors import ArgumentError
from ..attentions.masks import Call
from ..attentions.registry import Attention, gradients_of, usable
from ..emulate.explicit import golden_attention
from ..forward.inputs import DISTRIBUTIONS, draw
from ..numbers.formats import DTYPES, parse_format
from ..numbers.metrics import deviation
from ..study.files import new_result, write_result

COMPARED = ("ours", "ours-atomics", "ours+residual", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient",
            "sdpa-math", "explicit")  # fmt: skip
_HEADS = 2


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

    def attentions(
        self, dtype: torch.dtype, head_dim: int, backward: bool = False
    ) -> dict[str, Attention]:
        return usable(COMPARED, self.device, dtype, head_dim, backward)[0]

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


Found = list[dict[str, Any]]  # one for each point


def forward_deviation(plan: KernelPlan) -> Found:
    """Deviation of each attention's output, over formats, inputs and lengths."""
    points = []
    for where, call in plan.points(plan.seqlens):
        golden = golden_attention(call)
        for backend, attention in plan.attentions(call.q.dtype, where["head_dim"]).items():
            out = attention(call.q, call.k, call.v)
            result = deviation(out, golden, parse_format(where["format"]))
            points.append({**where, "backend": backend, "result": result})
    return points


def backward_deviation(plan: KernelPlan) -> Found:
    """Deviation of dq, dk and dv; with uniform inputs D decides them (`emulate.gradients`)."""
    points = []
    for where, call in plan.points(plan.seqlens[-4:-1]):
        dout = drawn_dout(call.q)
        golden = gradients_of("exact", call.to(torch.float64), dout.double())
        for backend, attention in plan.attentions(call.q.dtype, where["head_dim"], True).items():
            found = gradients_of(attention, call, dout)
            for name, actual, true in zip(("dq", "dk", "dv"), found, golden, strict=True):
                result = deviation(actual, true, parse_format(where["format"]))
                points.append({**where, "backend": backend, "gradient": name, "result": result})
    return points


def run_to_run(plan: KernelPlan) -> Found:
    """Repeats each attention's forward and backward on one set of tensors: the noise floor."""
    points = []
    repeats = 3 if plan.small else 10
    with_backward = plan.attentions(torch.bfloat16, 64, backward=True)
    for seqlen in plan.seqlens[-3:-1]:
        call = plan.call("normal", seqlen, 64, "bf16")
        dout = drawn_dout(call.q)
        for backend, attention in plan.attentions(torch.bfloat16, 64).items():
            outputs = {"out": [attention(call.q, call.k, call.v) for _ in range(repeats)]}
            if backend in with_backward:
                calls = [gradients_of(attention, call, dout) for _ in range(repeats)]
                outputs |= zip(("dq", "dk", "dv"), map(list, zip(*calls, strict=True)), strict=True)
            for output, values in outputs.items():
                first = values[0].double()
                floor = max(float((value.double() - first).abs().max()) for value in values)
                bits = [value.view(torch.int16) for value in values]
                points.append(
                    {"backend": backend, "output": output, "seqlen": seqlen,
                     "repeats": repeats, "max_difference": floor,
                     "same_bits": all(torch.equal(each, bits[0]) for each in bits),
                     "relative": floor / float(first.abs().max())}
                )  # fmt: skip
    return points


PARTS: dict[str, Callable[[KernelPlan], Found]] = {
    "forward": forward_deviation,
    "backward": backward_deviation,
    "run_to_run": run_to_run,
}


def run_kernels(plan: KernelPlan, folder: Path) -> dict[str, Any]:
    """Runs the study and writes its kernels.json.

    It is written after each part. A part that fails is left out and named; the others still run.

    Returns:
        Its content: {"forward": [...], "backward": [...], "run_to_run": [...],
        "missing": {...}, "failed": {part: message}, ...}; each list has one dict per point.

    Raises:
        ArgumentError: no draws, or no such device.
        RuntimeError: every part failed.
    """
    if plan.seeds < 1:
        raise ArgumentError(f"seeds: expected at least 1, got {plan.seeds}")
    check_device(plan.device)
    missing = {
        direction: usable(COMPARED, plan.device, torch.bfloat16, 64, direction == "backward")[1]
        for direction in ("forward", "backward")
    }
    value: dict[str, Any] = {
        **new_result("kernels", asdict(plan), plan.device),
        "seconds": {}, "missing": missing, "failed": {}, **{name: [] for name in PARTS},
    }  # fmt: skip
    with warnings.catch_warnings():
        # torch's warning that a kernel of the backward is not deterministic: that is the subject.
        warnings.simplefilter("ignore")
        for name, part in PARTS.items():
            start = time.monotonic()
            try:
                value[name] = part(plan)
            except Exception as error:
                value["failed"][name] = kind_and_line(error)
            value["seconds"][name] = time.monotonic() - start
            if len(value["failed"]) < len(value["seconds"]):
                write_result(folder, value)
    if len(value["failed"]) == len(PARTS):
        raise RuntimeError(
            f"every part of the study failed; the first: {value['failed']['forward']}"
        )
    return value
