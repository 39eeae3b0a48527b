"""Times attention beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..speed.measure import interleaved, summary
from .attention import Attention
from .rows import Shape
from .trial import reason_of

# Name, shape, batch, seqlen_q, seqlen_k, whether the backward is timed.
Problem = tuple[str, Shape, int, int, int, bool]
_PROBLEMS: tuple[Problem, ...] = (
    ("prefill B4 L4096 H32/8 D128", Shape(32, 8, 128, "cuda"), 4, 4096, 4096, False),
    ("decode B8 L4096 H32/8 D128", Shape(32, 8, 128, "cuda"), 8, 1, 4096, False),
    ("backward B4 L4096 H16 D128", Shape(16, 16, 128, "cuda"), 4, 4096, 4096, True),
)


def measure(
    attentions: Sequence[Attention], repeats: int = 20
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Times every attention on the current GPU, in turns; the first is ours.

    Args:
        attentions: what is timed.
        repeats: timed rounds.

    Yields:
        The name of each problem; with it `ms` (median), `ratio` to ours, and `failed` (reasons),
        each a list in the order of attentions with None where there is nothing.
    """
    for name, shape, batch, seqlen_q, seqlen_k, backward in _PROBLEMS:
        try:
            inputs = [t.requires_grad_(backward) for t in shape.inputs(batch, seqlen_q, seqlen_k)]
            yield name, _measure(attentions, inputs, seqlen_q > 1, backward, repeats)
        except Exception as error:  # out of memory, or a GPU that an attention before left broken
            nothing = [None] * len(attentions)
            failed = [reason_of(error)] * len(attentions)
            yield name, {"ms": nothing, "ratio": nothing, "failed": failed}


def _measure(
    attentions: Sequence[Attention],
    inputs: list[torch.Tensor],
    causal: bool,
    backward: bool,
    repeats: int,
) -> dict[str, Any]:
    calls: dict[str, Callable[[], object]] = {}
    failed: list[str | None] = []
    for index, attention in enumerate(attentions):
        try:
            call = _call(attention, inputs, causal, backward)
            call()
        except Exception as error:
            failed.append(reason_of(error))
            continue
        failed.append(None)
        calls[str(index)] = call
    with torch.set_grad_enabled(backward):
        timed = interleaved(calls, repeats=repeats)
    medians = {index: summary(values)["median"] for index, values in timed.items()}
    ms = [medians.get(str(index)) for index in range(len(attentions))]
    ours = ms[0]
    ratio = [None if one is None or not ours else round(one / ours, 3) for one in ms]
    return {"ms": ms, "ratio": ratio, "failed": failed}


def _call(
    attention: Attention, inputs: list[torch.Tensor], causal: bool, backward: bool
) -> Callable[[], object]:
    def forward() -> torch.Tensor:
        with attention.inside():
            return attention.attend(*inputs, causal=causal)

    if not backward:
        return forward
    out = forward()
    dout = torch.randn_like(out)

    def call() -> object:
        with attention.inside():
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return call
