"""Runs every row of the scoreboard on one attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..attentions.attention import GRADIENTS, Attention
from ..attentions.named import first_line
from ..bench.compare import compare
from ..shared.bits import difference
from .rows import ROWS, Attend, Heads, Row, Sizes

KEPT, BROKEN = "kept", "broken"
NOT_APPLICABLE, RAISED, NOT_RUN = "not-applicable", "raised", "not-run"
Result = dict[str, Any]


def try_rows(
    attention: Attention,
    expected: Attend,
    sizes: Sizes,
    seconds: float,
    on_row: Callable[[str], None],
) -> Iterator[tuple[str, Result]]:
    """Runs every row.

    Args:
        attention: the attention under test.
        expected: computes the same function, up to roundings.
        sizes: of the problems.
        seconds: after which no further case of a row starts; its first one always does.
        on_row: called with the id of each row that starts.

    Yields:
        The id of a row, and its result: `status`, `cases` and `equal` (how many were tried, and how
        many kept their bits), `reason` and `counter_example`, both None where there is none.
    """
    with attention.inside():
        problem = _other_function(attention, expected, sizes)
        for row in ROWS:
            on_row(row.id)
            if problem:
                yield row.id, _result(RAISED, reason=problem)
            else:
                yield row.id, _try(row, attention, sizes, time.monotonic() + seconds)


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
                return _result(RAISED, tried, equal, f"{name}: {reason_of(error)}", example)
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
        return reason_of(error)
    return ""


def reason_of(error: BaseException) -> str:
    """Returns the kind and the first line of an exception."""
    return f"{type(error).__name__}: {first_line(error)}"[:300]
