"""The backward that gathers keys for dq, and rows for dk and dv.

dq of this rank's rows is computed from gathered keys, as in the forward; dk and dv of its keys from
gathered rows: all rows that see them, in one call, which adds them in the order of one device. Each
call computes all three gradients and half of them are dropped, so it is twice the work of one
device. `summed_backward` avoids that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...types import Gradients
from ..messages import exchange
from ..messages.ranks import Ranks
from ..planning.layout import Tokens
from ..planning.plan import ROW_BLOCK, Call, divided, keys_under_rows, rows_on_keys
from .forward import KEYS, gathered
from .op_calls import Numbers, Rows, backward_call


def backward(
    ranks: Ranks,
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens_q: Tokens,
    tokens_k: Tokens,
    scores: Numbers,
    heads_k: int,
) -> Gradients:
    """Computes the gradients of this rank's q, k and v.

    Args:
        ranks: over which the sequences are distributed.
        rows: of this rank, with their results.
        k: as in `forward`; v and the others too.
        v: see k.
        tokens_q: see k.
        tokens_k: see k.
        scores: see k.
        heads_k: see k.

    Returns:
        dq, dk and dv, like q, k and v; 0 for tokens of no sequence.
    """
    gradients = dq, dk, dv = zeros_like(rows.q, k, v)
    parts = divided(tokens_q, tokens_k, scores.mask, ranks.rank)
    whole_sequences(parts.calls, rows, k, v, scores, gradients)
    if not parts.travels:
        return gradients
    group, nheads_k = rows.q.shape[1] // k.shape[1], k.shape[1]
    half = rows_on_keys(parts.q, parts.k, scores.mask, scores.key_align, ranks.rank)
    way = exchange.route(parts.k.layout, half.wanted, ranks.rank, half.room)
    for span, (keys, values) in gathered(ranks, way, [k, v], nheads_k, heads_k, KEYS):
        heads = slice(span.start * group, span.stop * group)
        own = rows.of_heads(heads)
        for call in half.calls:
            dq[call.rows, heads], _, _ = backward_call(
                own.of(call), keys[call.keys], values[call.keys], call, scores
            )
        del keys, values
    half = keys_under_rows(parts.q, parts.k, scores.mask, ROW_BLOCK, ranks.rank)
    way = exchange.route(parts.q.layout, half.wanted, ranks.rank, half.room)
    for span, found in gathered(ranks, way, rows, nheads_k, heads_k, "rows"):
        seeing = Rows(*found)
        for call in half.calls:
            place = (call.keys, span)
            _, dk[place], dv[place] = backward_call(
                seeing.of(call), k[place], v[place], call, scores
            )
        del found, seeing
    return gradients


def zeros_like(*tensors: torch.Tensor) -> Gradients:
    """Returns contiguous zeros of three tensors' shapes."""
    dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in tensors)
    return dq, dk, dv


def whole_sequences(
    calls: Sequence[Call],
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Numbers,
    gradients: Gradients,
) -> None:
    """Writes the gradients of the sequences that are entirely on this rank."""
    dq, dk, dv = gradients
    for call in calls:
        dq[call.rows], dk[call.keys], dv[call.keys] = backward_call(
            rows.of(call), k[call.keys], v[call.keys], call, scores
        )
