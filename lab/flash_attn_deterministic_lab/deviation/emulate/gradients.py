"""The backward of tiled attention, and an attention of any preset that can be trained with.

With P = exp(S - lse), dP = dO v^T and D = rowsum(dO * O): dS = P (dP - D), dq = dS k, dk = dS^T q,
dv = P^T dO (FlashAttention-2, section 3.1.2). Kernels form D from the O that the forward returned,
which is rounded. dP - D is a small difference of large numbers where the values of V are alike: an
error of D then is a large share of dS, and it is the same for all keys of a row, so that it does
not average out in dS k. `delta` says what D is formed from:

- "rounded": O in its 16-bit format, as every flash kernel does;
- "residual": O and what rounding took from it, in a second tensor of that format;
- "residual8": the same in 8 bits, as a fixed-point number of 1/256 gap of the format at O;
- "exact": O before it is rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from ..attentions.masks import Call
from ..numbers.formats import NAMES, NumberFormat, parse_format
from .simulate import tiled_attention
from .steps import PRESETS

DELTAS = ("rounded", "residual", "residual8", "exact")
_BLOCK_C = 64  # keys of a block


def kept_output(out: torch.Tensor, number_format: NumberFormat, delta: str) -> torch.Tensor:
    """Returns the O that D is formed from, of an output that is not yet rounded to the format."""
    if delta == "exact":
        return out
    rounded = number_format.round(out)
    if delta == "rounded":
        return rounded
    lost = out - rounded
    if delta == "residual":
        return rounded + number_format.round(lost)
    step = number_format.ulp(rounded).to(out.dtype) / 256
    return rounded + (lost / step).round().clamp(-128, 127) * step


class _Emulated(torch.autograd.Function):
    """The tensors are those of the call, which autograd does not look into."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        call: Call, preset: str, name: str, delta: str,
    ) -> torch.Tensor:  # fmt: skip
        number_format, found = parse_format(name or NAMES[q.dtype]), PRESETS[preset]
        steps = {n: f for n, f in found.steps(number_format).items() if n != "out"}
        unrounded = tiled_attention(call.to(number_format.container), found, steps, _BLOCK_C)
        kept = kept_output(unrounded, number_format, delta)
        ctx.save_for_backward(q, k, v, kept, call.mask)
        ctx.scale, ctx.number_format = call.factor, number_format
        return number_format.round(unrounded).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """P and dS are in the format on their way into products, the rest in the container."""
        *tensors, kept, bias = ctx.saved_tensors
        q, k, v, dout = (tensor.to(kept.dtype) for tensor in (*tensors, grads[0]))
        rounded = ctx.number_format.round
        scores = q @ k.mT * ctx.scale
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        # A row without a key has no gradient: 0, not NaN.
        probs = scores.softmax(-1).nan_to_num(0.0)
        delta = (dout * kept).sum(-1, keepdim=True)
        dscores = rounded(probs * (dout @ v.mT - delta))
        found = (dscores @ k * ctx.scale, dscores.mT @ q * ctx.scale, rounded(probs).mT @ dout)
        cast = [rounded(g).to(tensor.dtype) for g, tensor in zip(found, tensors, strict=True)]
        return (*cast, None, None, None, None)


def emulated_attention(call: Call, preset: str, name: str, delta: str) -> torch.Tensor:
    """Attention of a preset with a backward; without a name, the format is that of the tensors."""
    call = call.plain()
    out: torch.Tensor = _Emulated.apply(call.q, call.k, call.v, call, preset, name, delta)  # type: ignore[no-untyped-call]
    return out
