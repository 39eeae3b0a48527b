"""Tiled attention with a number format per step.

Tensors are (..., seqlen, head_dim), in float32 or float64; the leading dimensions are a batch.
Products are summed in the container (float32 or float64), as tensor cores sum them in float32, and
a step's result is then rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ..attentions.masks import Call
from .steps import STEP_NAMES, Preset, Steps

_CHUNK = 1 << 20  # elements of the largest tensor of a step: about what caches hold
# 2^x of x in [0, 1): the cubic through 1 at 0 with the smallest largest relative error (8.6e-5).
_CUBIC = (1.0, 0.69511663, 0.22764498, 0.07706724)


def _or_one(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total == 0, 1.0, total)


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


def tiled_attention(call: Call, preset: Preset, steps: Steps, block_c: int) -> torch.Tensor:
    """Computes tiled attention by a preset's algorithm.

    Rows do not touch each other: B_r, the rows of a tile, is no part of the arithmetic.

    A block has `block_c` keys, the last one of a split the rest; each step has a number format.
    Tensors are float32 or float64.
    """
    call = call.plain()
    rounded = {name: steps[name].round if name in steps else _as_it_is for name in STEP_NAMES}

    def attend(rows: Call) -> torch.Tensor:
        if preset.algorithm == "renormalised":
            return _renormalised(rows, rounded, block_c)
        return _running(rows, preset, rounded, block_c)

    # As many rows at a time as the caches hold.
    lead = math.prod(call.q.shape[:-2]) * max(block_c, call.q.shape[-1])
    parts = [attend(rows) for rows in call.by_rows(max(64, _CHUNK // lead))]
    return rounded["out"](torch.cat(parts, -2))


_State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # m, l and O of each row
_Rounded = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


def _nothing(q: torch.Tensor, v: torch.Tensor) -> _State:
    """The state before any key."""
    row_max = q.new_full((*q.shape[:-1], 1), -math.inf)
    return row_max, torch.zeros_like(row_max), q.new_zeros((*q.shape[:-1], v.shape[-1]))


def _renormalised(call: Call, rounded: _Rounded, block_c: int) -> torch.Tensor:
    """FlashAttention's algorithm 1: O is divided by l after every block of keys, first to last."""
    row_max, row_sum, out = _nothing(call.q, call.v)
    for start in range(0, call.k.shape[-2], block_c):
        keys = slice(start, start + block_c)
        scores = rounded["scores"](call.q @ call.k[..., keys, :].mT * call.factor)
        if call.mask is not None:
            scores = rounded["scores"](scores + call.bias_of(keys))
        block_max = rounded["row_max"](scores.amax(-1, keepdim=True))
        hidden = block_max == -math.inf
        probs = rounded["probs"]((scores - torch.where(hidden, 0.0, block_max)).exp_())
        block_sum = rounded["row_sum"](probs.sum(-1, keepdim=True))
        after = rounded["row_max"](torch.maximum(row_max, block_max))
        shift = torch.where(after == -math.inf, 0.0, after)
        old = rounded["rescale"]((row_max - shift).exp_())
        new = rounded["rescale"]((block_max - shift).exp_())
        term = rounded["sum_terms"]
        total = rounded["row_sum"](term(old * row_sum) + term(new * block_sum))
        product = rounded["acc"](probs @ call.v[..., keys, :])
        weight = rounded["weight"](row_sum * old)
        mixed = rounded["products"](weight * out) + rounded["products"](new * product)
        out = rounded["state"](rounded["mixed"](mixed) / _or_one(total))
        row_max, row_sum = after, total
    return out


def _running(call: Call, preset: Preset, rounded: _Rounded, block_c: int) -> torch.Tensor:
    """The kernels' order: blocks and splits last to first, O divided by l once, at the end.

    P has a format on its way into products; all else is in the container, as in the kernels.
    """
    seqlen = call.k.shape[-2]
    split_size = preset.split_size or seqlen
    base = call.factor * math.log2(math.e)  # the kernels' exponentials are powers of two
    power = _cubic_exp2 if preset.cubic else torch.exp2
    state = None
    for split in range((seqlen - 1) // split_size * split_size, -1, -split_size):
        row_max, row_sum, acc = _nothing(call.q, call.v)
        last = min(split + split_size, seqlen)
        for start in range((last - split - 1) // block_c * block_c + split, split - 1,
                           -block_c):  # fmt: skip
            keys = slice(start, min(start + block_c, last))
            # Scores before their scale: what is added to them is divided by it.
            scores = call.q @ call.k[..., keys, :].mT
            if call.mask is not None:
                scores = scores + call.bias_of(keys) / call.factor
            after = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # A maximum that grows little is left where it is: P may then exceed 1.
            stays = (after - row_max) * base <= preset.threshold
            after = torch.where(stays & (row_max != -math.inf), row_max, after)
            shift = torch.where(after == -math.inf, 0.0, after)
            old = power((row_max - shift) * base)
            probs = power((scores - shift) * base)
            row_sum = row_sum * old + probs.sum(-1, keepdim=True)
            probs = rounded["probs"](probs * preset.probs_scale) / preset.probs_scale
            acc = acc * old + probs @ call.v[..., keys, :]
            row_max = after
        part = (row_max, row_sum, acc)
        state = part if state is None else _merged(state, part, base)
    if state is None:
        return _nothing(call.q, call.v)[2]
    return state[2] / _or_one(state[1])


def _merged(left: _State, right: _State, base: float) -> _State:
    row_max = torch.maximum(left[0], right[0])
    shift = torch.where(row_max == -math.inf, 0.0, row_max)
    first, second = (torch.exp2((part[0] - shift) * base) for part in (left, right))
    return row_max, left[1] * first + right[1] * second, left[2] * first + right[2] * second


def _cubic_exp2(values: torch.Tensor) -> torch.Tensor:
    """2^x as 2^floor(x) times a cubic of the rest, as kernels do to spare the exponential unit."""
    whole = values.clamp(min=-200.0).floor()
    rest = values - whole
    result = torch.full_like(rest, _CUBIC[3])
    for coefficient in _CUBIC[2::-1]:
        result = result * rest + coefficient
    return torch.where(values < -200.0, 0.0, result * torch.exp2(whole))
