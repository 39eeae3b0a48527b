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

from ...errors import ArgumentError
from ..numbers.formats import NumberFormat, parse_format
from .simulate import tiled_attention
from .steps import find_preset

DELTAS = ("rounded", "residual", "residual8", "exact")
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_BLOCK_C = 64  # keys of a block
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def kept_output(out: torch.Tensor, number_format: NumberFormat, delta: str) -> torch.Tensor:
    """Returns the O that D is formed from.

    Args:
        out: the output before it is rounded, float32 or float64.
        number_format: that of the output.
        delta: see above.

    Raises:
        ArgumentError: an unknown delta.
    """
    if delta not in DELTAS:
        raise ArgumentError(f"delta: expected one of {', '.join(DELTAS)}, got {delta!r}")
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


def tiled_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    scale: float,
    number_format: NumberFormat,
    bias: torch.Tensor | None = None,
) -> Gradients:
    """Computes dq, dk and dv with P and dS in the format and the rest in the container.

    Args:
        q: (..., seqlen_q, head_dim), float32 or float64.
        k: (..., seqlen_k, head_dim).
        v: like k.
        out: like q; what D is formed from (`kept_output`).
        dout: like q.
        scale: factor of q k^T.
        number_format: of P and dS on their way into products, and of the results.
        bias: added to the scores, broadcast to (..., seqlen_q, seqlen_k); -inf hides a key.
    """
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    # A row without a key has nothing to give.
    probs = scores.softmax(-1).nan_to_num(0.0)
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = number_format.round(probs * (dout @ v.mT - delta))
    dq, dk = dscores @ k * scale, dscores.mT @ q * scale
    dv = number_format.round(probs).mT @ dout
    return number_format.round(dq), number_format.round(dk), number_format.round(dv)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        preset: str,
        name: str,
        delta: str,
    ) -> torch.Tensor:
        number_format, found = parse_format(name or _FORMATS[q.dtype]), find_preset(preset)
        wide = [tensor.to(number_format.container) for tensor in (q, k, v)]
        steps = {n: f for n, f in found.steps(number_format).items() if n != "out"}
        unrounded = tiled_attention(
            wide[0], wide[1], wide[2], scale, found, steps, _BLOCK_C, None, bias
        )
        kept = kept_output(unrounded, number_format, delta)
        ctx.save_for_backward(q, k, v, kept, bias)
        ctx.scale, ctx.number_format = scale, number_format
        return number_format.round(unrounded).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        *tensors, kept, bias = ctx.saved_tensors
        wide = [tensor.to(kept.dtype) for tensor in (*tensors, kept, grads[0])]
        found = tiled_gradients(
            wide[0], wide[1], wide[2], wide[3], wide[4], ctx.scale, ctx.number_format, bias
        )
        cast = [g.to(tensor.dtype) for g, tensor in zip(found, tensors, strict=True)]
        return (*cast, None, None, None, None, None)


def emulated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    preset: str,
    name: str,
    delta: str,
) -> torch.Tensor:
    """Attention of a preset with a backward.

    Args:
        q: (..., seqlen_q, head_dim).
        k: (..., seqlen_k, head_dim).
        v: like k.
        bias: added to the scores, broadcast to (..., seqlen_q, seqlen_k); None: nothing.
        scale: factor of q k^T.
        preset: name of a preset.
        name: of the format under test; "": that of the tensors.
        delta: what D is formed from.
    """
    out: torch.Tensor = _Emulated.apply(q, k, v, bias, scale, preset, name, delta)  # type: ignore[no-untyped-call]
    return out
