"""The state of the online softmax after some keys, and the merge of two states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import ieee
from .formats import DEFAULT_FORMATS, Formats, round_to

INF = float("inf")


class State(NamedTuple):
    """The state of rows after some keys, not normalised.

    Args:
        row_max: (..., rows, 1), -inf before the first visible key.
        row_sum: (..., rows, 1), 0 before the first visible key.
        acc: (..., rows, head_dim).
    """

    row_max: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor


def empty_state(q: torch.Tensor, head_dim: int) -> State:
    """Returns the state of rows q (..., rows, n) before the first key; head_dim: that of acc."""
    rows = q.shape[:-1]
    column = (*rows, 1)
    return State(q.new_full(column, -INF), q.new_zeros(column), q.new_zeros((*rows, head_dim)))


def merge_state(
    running: State, part: State, scale_log2: float, formats: Formats = DEFAULT_FORMATS
) -> State:
    """Merges the state of one more split into the running one, that of the later splits.

    If a row of one state is empty (row_sum 0), the other's is returned unchanged; a NaN sum is not
    empty.
    """
    row_max = round_to(torch.maximum(running.row_max, part.row_max), formats.row_max)
    scale_running = rescale_factor(running.row_max, row_max, scale_log2, formats)
    scale_part = rescale_factor(part.row_max, row_max, scale_log2, formats)
    merged = State(
        row_max,
        round_to(running.row_sum * scale_running + part.row_sum * scale_part, formats.row_sum),
        round_to(running.acc * scale_running + part.acc * scale_part, formats.acc),
    )
    running_empty = running.row_sum == 0
    part_empty = part.row_sum == 0
    return State(
        *(
            torch.where(part_empty, r, torch.where(running_empty, p, m))
            for r, p, m in zip(running, part, merged, strict=True)
        )
    )


def rescale_factor(
    before: torch.Tensor, after: torch.Tensor, scale_log2: float, formats: Formats
) -> torch.Tensor:
    """Returns 2^((before - after) * scale_log2), the factor of sums when the maximum changes."""
    factor = ieee.exp2((before - after) * scale_log2)
    # Before the first key: (-inf - -inf) or -inf times a scale <= 0 would give NaN or infinity.
    factor = torch.where(before == -INF, 0.0, factor)
    return round_to(factor, formats.rescale)


def normalise(
    state: State, scale: float, formats: Formats, keep_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (..., rows, head_dim) and lse (..., rows); without a visible key 0 and +inf.

    keep_scale is a factor of out with dropout; lse is that of all weights.
    """
    empty = state.row_sum == 0
    if keep_scale is None:
        out = state.acc / state.row_sum
    else:
        out = state.acc * (1.0 / state.row_sum * keep_scale)
    out = round_to(out, formats.out)
    # An accumulator of -0 counts too: its sign depends on the masked blocks that were visited.
    out = torch.where(empty | (state.acc == 0), 0.0, out)
    lse = state.row_max * scale + ieee.log(state.row_sum)
    return out, torch.where(empty, INF, lse).squeeze(-1)
