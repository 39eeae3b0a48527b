"""Gradients of the ops.

`kvcache_fwd` has none: it writes to its arguments, and torch.library.register_autograd takes only
ops that do not.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from .schemas import NAMESPACE, Gradients, Outputs

DIFFERENTIABLE = ("fwd", "varlen_fwd")


def register(library: Any) -> None:
    """Registers the backward of each op that has one."""
    library.impl("bwd_missing", _bwd_missing, "CompositeExplicitAutograd")
    for name in DIFFERENTIABLE:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", _backward, setup_context=_setup_context, lib=library
        )


def _bwd_missing(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Gradients:
    raise UnsupportedError(
        "this version of flash_attn_deterministic has no backward: call it under "
        "torch.no_grad(), or detach q, k and v"
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    # The inputs hold the mode, resolved once: the backward must not look it up again.
    ctx.save_for_backward(*inputs[:3])
    ctx.others = len(inputs) - 3


def _backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv = torch.ops.flash_attn_deterministic.bwd_missing(dout, *ctx.saved_tensors)
    return (dq, dk, dv, *[None] * ctx.others)
