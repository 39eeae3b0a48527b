"""The attention of a training run: functions of q, k, v (batch, nheads, seqlen, head_dim)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ...errors import ArgumentError
from ..blocks import Blocks
from ..formats import NumberFormat, parse_format
from ..simulate import renormalised_attention
from ..steps import Steps

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def explicit_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Matmul, softmax, matmul, each with its result in the tensors' dtype."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    out: torch.Tensor = scores.softmax(-1) @ v
    return out


class _Tiled(torch.autograd.Function):
    """FlashAttention's algorithm 1 with every step in the tensors' dtype; its usual backward."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_c: int
    ) -> torch.Tensor:
        number_format = parse_format(_FORMATS[q.dtype])
        scale = q.shape[-1] ** -0.5
        wide = (q.float(), k.float(), v.float())
        out = renormalised_attention(
            *wide, scale, Steps.all(number_format), Blocks(64, block_c)
        ).to(q.dtype)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        rounded = parse_format(_FORMATS[q.dtype])
        return (*_backward(q, k, v, out, grads[0], rounded), None)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    number_format: NumberFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv with P and dS in the format and the rest in float32, as kernels do."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    q, k, v, out, dout = (tensor.float() for tensor in (q, k, v, out, dout))
    probs = (q @ k.mT * scale).softmax(-1)
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = number_format.round(probs * (dout @ v.mT - delta))
    dq, dk = dscores @ k * scale, dscores.mT @ q * scale
    dv = number_format.round(probs).mT @ dout
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_c: int = 16
) -> torch.Tensor:
    """The preset `paper` with a backward."""
    result: torch.Tensor = _Tiled.apply(q, k, v, block_c)  # type: ignore[no-untyped-call]
    return result


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's own choice of kernel."""
    return functional.scaled_dot_product_attention(q, k, v)


def our_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deterministic: bool = True
) -> torch.Tensor:
    """This package's kernels (float32 goes through bfloat16, which is all they take)."""
    from ... import deterministic_mode, flash_attn_func

    dtype = q.dtype if q.dtype != torch.float32 else torch.bfloat16
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (q, k, v))
    with deterministic_mode(deterministic):
        out = flash_attn_func(q, k, v, deterministic=deterministic)
    return out.transpose(1, 2)


IMPLEMENTATIONS: dict[str, Attention] = {
    "baseline": explicit_attention,
    "flash": tiled_attention,
    "sdpa": torch_attention,
    "ours": our_attention,
    "ours_nondeterministic": functools.partial(our_attention, deterministic=False),
}


def find_attention(name: str) -> Attention:
    """Returns an implementation, which computes in the dtype of its inputs also under autocast.

    Raises:
        ArgumentError: there is none of this name.
    """
    if name not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"attention: expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}"
        )
    return functools.partial(_in_own_dtype, IMPLEMENTATIONS[name])


def _in_own_dtype(
    implementation: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    # Autocast would move the softmax of explicit attention to float32.
    with torch.autocast(q.device.type, enabled=False):
        return implementation(q, k, v)
