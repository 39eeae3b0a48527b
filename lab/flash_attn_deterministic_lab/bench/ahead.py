"""Calls attentions once on each shape, in several processes: what is compiled is then there."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import time
from collections.abc import Sequence

import torch

from ..attentions import find_attention
from ..attentions.named import first_line_or_kind
from .measure import timed_call
from .problem import Problem, Shape


def call_each(
    shapes: Sequence[Shape], device: str, names: Sequence[str], jobs: int, seconds: float
) -> int:
    """Calls every attention once on every shape, with its backward where the shape has one.

    No shape starts after `seconds`. Prints what each call took, and why one failed.

    Returns:
        1 if every call failed, otherwise 0.
    """
    end, worked = time.time() + seconds, 0
    call = functools.partial(_call, device=device, names=names, end=end)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for shape, outcomes in zip(shapes, pool.map(call, shapes), strict=True):
            worked += any(outcome.endswith(" s") for outcome in outcomes.values())
            words = ", ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
            print(f"{shape.name}: {words}", flush=True)
    return int(not worked)


def _call(shape: Shape, device: str, names: Sequence[str], end: float) -> dict[str, str]:
    outcomes = {}
    for name in names:
        begin = time.time()
        if begin > end:
            outcomes[name] = "no time left"
            continue
        try:
            _one(shape, device, name)
            outcomes[name] = f"{time.time() - begin:.1f} s"
        except Exception as error:  # it is timed, and named, with the others
            outcomes[name] = first_line_or_kind(error)
    return outcomes


def _one(shape: Shape, device: str, name: str) -> None:
    with torch.set_grad_enabled(shape.kind == "backward"):
        timed_call(find_attention(name), Problem.draw(shape, device))()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # others need it
