"""Times attentions on one shape, in turns."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import Any

import torch

from ..attentions import ATTENTIONS, Attention
from ..attentions.named import kind_and_line
from ..attentions.registry import OURS
from ..errors import UnavailableError
from ..shared.timing import capture, on_cpu, peak_memory, rotation, summary, within
from .cases import KERNEL_HEAD_DIMS, Study
from .problem import Problem, Shape

READ = "read"  # stands for a kernel that only reads keys and values: the floor of a decode
_REASON = 160  # characters of the reason why an attention failed
# Far above the roundings of 16-bit numbers, far below the effect of another mask.
_TOLERANCE = 0.05
_DISTURBED = 1.5  # the same call's times are within a few per cent of each other
Result = tuple[torch.Tensor, ...]
Call = Callable[[], Result]


def measure(
    shape: Shape,
    device: str,
    attentions: Sequence[Attention],
    repeats: int,
    budget_ms: float = math.inf,
    floor: bool = False,
) -> dict[str, Any]:
    """Times all attentions that can run a shape.

    Args:
        shape: what to time.
        device: "cuda" or "cpu".
        attentions: the first is what others are compared with.
        repeats: timed rounds, at most.
        budget_ms: milliseconds of GPU time for them, which may cost rounds.
        floor: whether to time, of a decode on a GPU, the reading of keys and values alone.

    Returns:
        `name`; `ms` and, on CUDA, `peak_bytes` above the inputs by attention; those `disturbed`;
        `ratio` of each median to the first's; `tflops` of each; `failed`: reasons by attention.
    """
    calls: dict[str, _Isolated] = {}
    failed: dict[str, str] = {}
    peaks: dict[str, int] = {}
    expected: Result | None = None
    per_call = 1
    try:
        if device == "cuda":
            # The graphs of the last shape had memory of their own.
            torch.cuda.empty_cache()
        graphs = device == "cuda" and shape.kind == "decode"
        sets, per_call = rotation(shape.kv_bytes) if graphs else (1, 1)
        problems = [Problem.draw(shape, device, seed) for seed in range(sets)]
        with torch.set_grad_enabled(shape.kind == "backward"):
            for attention in attentions:
                try:
                    steps, result, peak = _prepare(attention, problems, expected)
                    calls[attention.name] = _Isolated(
                        capture(lambda i, steps=steps: steps[i](), sets, per_call).replay  # type: ignore[misc]
                        if graphs
                        else steps[0]
                    )
                except Exception as error:
                    failed[attention.name] = _reason(error)
                    continue
                if peak is not None:
                    peaks[attention.name] = peak
                if expected is None:
                    expected = result
            if floor and graphs:
                # The sum of 16-bit numbers taken two by two for float32: all is read.
                stored = [(one.k,) if shape.head_dim_v else (one.k, one.v) for one in problems]
                read = capture(
                    lambda i: [t.view(torch.float32).sum() for t in stored[i]], sets, per_call
                )
                calls[READ] = _Isolated(read.replay)
            timed = on_cpu(calls, repeats) if device == "cpu" else within(calls, budget_ms, repeats)
    except Exception as error:  # out of memory, or a call broke the GPU
        timed = {}
        failed = {one.name: failed.get(one.name, _reason(error)) for one in attentions}
    failed |= {name: one.reason for name, one in calls.items() if one.reason}
    times = {
        name: summary([ms / per_call for ms in values])
        for name, values in timed.items()
        if name not in failed
    }
    first = times.get(attentions[0].name, {"median": math.nan})["median"]
    return {
        "name": shape.name,
        **{name: value for name, value in asdict(shape).items() if value not in ("", 0, -1, ())},
        "ms": times,
        "repeats": max(map(len, timed.values()), default=0),
        "disturbed": disturbed(times),
        "ratio": {
            name: round(one["median"] / first, 4)
            for name, one in times.items()
            if not math.isnan(first)
        },
        "tflops": {n: round(shape.flops / one["median"] / 1e9, 1) for n, one in times.items()},
        "peak_bytes": {name: peak for name, peak in peaks.items() if name in times},
        "failed": failed,
    }


def _prepare(
    attention: Attention, problems: Sequence[Problem], expected: Result | None
) -> tuple[list[Call], Result, int | None]:
    """Makes an attention ready to be timed, and compares its result with that of the first.

    Returns:
        What to time on each problem, the first's result, and its peak memory on CUDA.

    Raises:
        Exception: it can't run the problem, or computes something else.
    """
    shape, cuda = problems[0].shape, problems[0].q.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    calls = [timed_call(attention, problem) for problem in problems]
    for call in calls[1:]:  # what plans by lengths and pages does so before a graph is captured
        call()
    result = tuple(tensor.detach().clone() for tensor in calls[0]())
    if expected is not None:
        compare(result, expected)
    if not cuda:
        return calls, result, None
    results = sum(tensor.nbytes for tensor in result)
    # A workspace that an attention keeps counts; what autograd saved for a backward does not.
    kept = 0 if shape.kind == "backward" else torch.cuda.memory_allocated() - before - results
    return calls, result, max(0, kept) + peak_memory(calls[0])


def compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Compares results of a peer with ours.

    Both the largest and the root mean square difference count: the largest alone would miss errors
    in rows of small numbers, such as the later ones of a causal mask.

    Raises:
        ValueError: they differ by more than roundings.
    """
    shapes = [[tuple(t.shape) for t in side] for side in (results, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the result has shape {shapes[0]}, ours has {shapes[1]}")
    for result, ours in zip(results, expected, strict=True):
        gap = result.float() - ours.float()
        largest, scale = float(gap.abs().max()), float(ours.float().abs().max())
        rms, rms_scale = (float(t.float().square().mean().sqrt()) for t in (gap, ours))
        # Not "above": a NaN is neither above nor below.
        if not (largest <= _TOLERANCE * scale and rms <= _TOLERANCE * rms_scale):
            raise ValueError(f"the result differs from ours by {largest:.3g}, rms {rms:.3g}")


def timed_call(attention: Attention, problem: Problem) -> Call:
    """Returns what is timed: it computes out, or for a backward dq, dk and dv."""
    q, k, v, dout, options = problem.q, problem.k, problem.v, problem.dout, problem.options
    if problem.shape.kind == "backward":
        return attention.gradients(q, k, v, dout, **options)

    def forward() -> Result:
        with attention.inside():
            return (attention(q, k, v, **options),)

    return forward


class _Isolated:
    """A call that, once it has raised, keeps the reason and does nothing more."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.reason = ""

    def __call__(self) -> None:
        if self.reason:
            return
        try:
            self._call()
        except Exception as error:
            self.reason = _reason(error)


def _reason(error: BaseException) -> str:
    """Sums up an exception in one sentence; its cause, if it has one, as compilers wrap theirs.

    Folders of this machine are left out: they are of no use to readers elsewhere.
    """
    while error.__cause__ is not None and not isinstance(error, UnavailableError):
        error = error.__cause__
    sentence = re.split(r"(?<=\w)[.;] ", kind_and_line(error))[0]
    return textwrap.shorten(sentence, _REASON, placeholder=" ...")


def disturbed(times: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names those whose median is far above their shortest times: other work ran beside them."""
    return [name for name, ms in times.items() if ms["median"] > _DISTURBED * ms["p10"]]


def summarise(cases: Sequence[dict[str, Any]], study: Study) -> dict[str, dict[str, Any]]:
    """Sums up our time over others'.

    Returns:
        By group ("all", those of the cases, and "D128" for head dims that run its kernels, padded
        ones too, neither windows nor latent), then by attention (and "best": the fastest rival of a
        case): geometric `mean`, `worst` and its case, `cases`. Chunks count for those that have a
        mask; `disturbed` ones do not.
    """
    # A tensor of the mask takes longer than their kernels would.
    without_mask = {name for name, one in ATTENTIONS.items() if not one.chunk_mask}
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for case in cases:
        disturbed = case.get("disturbed", ())
        if OURS.name in disturbed:
            continue
        left_out = {OURS.name, *disturbed, *(without_mask if case["group"] == "chunk" else ())}
        over = {n: round(1 / ratio, 4) for n, ratio in case["ratio"].items() if n not in left_out}
        rivals = [over[name] for name in study.rivals if name in over]
        over |= {"best": max(rivals)} if rivals else {}
        of_dim = [f"D{dim}" for dim in KERNEL_HEAD_DIMS if dim >= case["head_dim"]][:1]
        # Windows would hide the rest: some rivals take seven times as long there.
        of_dim *= case["group"] != "window"
        for group in dict.fromkeys(("all", case["group"], *of_dim)):
            for name, ratio in over.items():
                found.setdefault(group, {}).setdefault(name, []).append((ratio, case["name"]))
    return {
        group: {
            name: {
                "mean": round(geometric_mean(ratio for ratio, _ in own), 4),
                "worst": max(own)[0],
                "worst_case": max(own)[1],
                "cases": len(own),
            }
            for name, own in names.items()
        }
        for group, names in found.items()
    }
