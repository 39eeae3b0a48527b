"""Runs every row of the scoreboard on one attention."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..attentions import find_attention
from ..attentions.attention import GRADIENTS, Attention
from ..attentions.named import kind_and_line
from ..bench.measure import compare
from ..shared.bits import difference
from ..shared.commands import variable
from .rows import ROWS, Attend, Heads, Row, Sizes

KEPT, BROKEN = "kept", "broken"
NOT_APPLICABLE, RAISED, NOT_RUN = "not-applicable", "raised", "not-run"
Result = dict[str, Any]


def try_row(
    row: Row, attention: Attention, expected: Attend, sizes: Sizes, seconds: float
) -> Result:
    """Runs a row on an attention that computes, up to roundings, the same function as `expected`.

    After `seconds` no further case starts; the first one always does.

    Returns:
        `status`, `cases` and `equal` (how many were tried, and how many kept their bits), `reason`
        and `counter_example`, both None where there is none.
    """
    with attention.inside():
        if problem := _other_function(attention, expected, sizes):
            return _result(RAISED, reason=problem)
        return _try(row, attention, sizes, time.monotonic() + seconds)


def try_all(
    attentions: Sequence[Attention], sizes: Sizes, seconds: float, jobs: int
) -> Iterator[tuple[str, str, Result]]:
    """Runs every row of several attentions; the first computes what is expected.

    With several jobs, so many processes run a row of an attention each: equality needs no GPU of
    its own, and what compiles a kernel for each shape compiles several at once.

    Yields:
        Name, id of the row, and its result, see `try_row`.
    """
    first = attentions[0]
    if jobs == 1:
        for one, row in itertools.product(attentions, ROWS):
            yield one.name, row.id, try_row(row, one, first, sizes, seconds)
        return
    context = multiprocessing.get_context("spawn")
    # torch would compile each kernel with as many processes as there are cores.
    with variable("TORCHINDUCTOR_COMPILE_THREADS", "1"):
        pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context)
        try:
            waiting = {
                pool.submit(_named_row, number, one.name, first.name, sizes, seconds): (one, row)
                for one, (number, row) in itertools.product(attentions, enumerate(ROWS))
            }
            for done in concurrent.futures.as_completed(waiting):
                one, row = waiting[done]
                try:
                    result = done.result()
                except concurrent.futures.BrokenExecutor as error:  # a call killed its process
                    result = _result(NOT_RUN, reason=kind_and_line(error))
                yield one.name, row.id, result
        finally:
            pool.shutdown(cancel_futures=True)


def _named_row(number: int, name: str, expected: str, sizes: Sizes, seconds: float) -> Result:
    """The same by what another process can be given."""
    return try_row(ROWS[number], find_attention(name), find_attention(expected), sizes, seconds)


def not_run() -> dict[str, Result]:
    """Returns the results of a run that has not begun, by row."""
    return {row.id: _result(NOT_RUN, reason="the run ended before it") for row in ROWS}


def _result(
    status: str,
    cases: int = 0,
    equal: int = 0,
    reason: str | None = None,
    counter_example: str | None = None,
) -> Result:
    counts = {"status": status, "cases": cases, "equal": equal}
    return {**counts, "reason": reason, "counter_example": counter_example}


def _try(row: Row, attention: Attention, sizes: Sizes, end: float) -> Result:
    if row.lengths and "seqlens_k" not in attention.takes:
        return _result(NOT_APPLICABLE, reason="its calls take no lengths of keys")
    if row.gradients and GRADIENTS not in attention.takes:
        return _result(NOT_APPLICABLE, reason="it has no backward")
    tried = equal = 0
    example: str | None = None

    def attend(*inputs: Any, **options: Any) -> torch.Tensor:
        # A copy: a function may return the same memory each time.
        return attention(*inputs, **options).clone()

    with torch.set_grad_enabled(row.gradients):
        for name, pairs in row.cases(attend, sizes):
            if tried and time.monotonic() > end:
                # A row is kept only if all of its cases ran; one that differs breaks it anyway.
                status = NOT_RUN if equal == tried else BROKEN
                reason = f"time was over after {tried} cases, of which {equal} were equal"
                return _result(status, tried, equal, reason, example)
            found = None
            try:
                for what, (left, right) in pairs:
                    differs = difference(left, right)
                    if differs is not None and found is None:
                        found = f"{name}, {what}: {differs.words}"
            except Exception as error:
                return _result(RAISED, tried, equal, f"{name}: {kind_and_line(error)}", example)
            tried += 1
            equal += found is None
            example = example or found
    if not tried:
        return _result(NOT_APPLICABLE, reason=f"no such case on {sizes.device}")
    return _result(KEPT if equal == tried else BROKEN, tried, equal, counter_example=example)


def _other_function(attend: Attend, expected: Attend, sizes: Sizes) -> str:
    """Returns "" if two compute the same function, otherwise how they differ."""
    shape = Heads(*sizes.heads[0], sizes.head_dims[0], sizes.device)
    inputs = shape.inputs(2, 100, 100)
    try:
        with torch.no_grad():
            compare([attend(*inputs, causal=True)], [expected(*inputs, causal=True)])
    except Exception as error:
        return kind_and_line(error)
    return ""
