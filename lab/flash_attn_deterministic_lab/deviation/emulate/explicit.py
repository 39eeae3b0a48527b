"""Attention written out: products, scaling and softmax, each with its result in a number format."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..attentions.masks import Call
from ..numbers.formats import NumberFormat, parse_format

_SCORES = 1 << 22  # at a time: about what caches hold


class _Rounded(torch.autograd.Function):
    """Rounds a tensor, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
        ctx.number_format = number_format
        return number_format.round(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.number_format.round(grads[0]), None


def explicit_attention(call: Call, number_format: NumberFormat) -> torch.Tensor:
    """Computes what explicit code does with tensors of a format, and so does its backward.

    Products are summed, and softmax works, in the format's container, which is the result's dtype;
    rows without a key give 0.
    """
    call = call.plain().to(number_format.container)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Rounded.apply(values, number_format)  # type: ignore[no-untyped-call]
        return found

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Any:
        scores = rounded(rounded(q @ k.mT) * call.factor)
        if mask is not None:
            scores = rounded(scores + mask.to(scores.dtype))
        return rounded(rounded(softmax(scores)) @ v)

    # Some rows at a time, computed again in the backward: scores of all would not fit.
    lead = math.prod(call.q.shape[:-2]) * call.k.shape[-2]
    parts = [
        checkpoint(attend, rows.q, rows.k, rows.v, rows.mask, use_reentrant=False,
                   preserve_rng_state=False)
        for rows in call.by_rows(max(1, _SCORES // max(1, lead)))
    ]  # fmt: skip
    return torch.cat(parts, -2)


def golden_attention(call: Call) -> torch.Tensor:
    """Computes softmax(q k^T * scale + bias) v in float64."""
    return explicit_attention(call, parse_format("fp64"))


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over keys; a row without a key gives 0, as in torch's attention, and no NaN."""
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
