"""Refuses derivatives without a formula, for which torch would return zero or raise obscurely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import UnsupportedError


def check_no_tangent(values: Iterable[Any]) -> None:
    """Refuses forward-mode automatic differentiation, for which torch would return zero.

    Args:
        values: arguments of an op; only tensors are checked.

    Raises:
        UnsupportedError: one of them carries a tangent, of torch.func.jvp for instance, or
            torch.compile traces this inside a forward-mode level.
    """
    # Private, but unpacking each tensor instead costs microseconds in every call.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if torch.compiler.is_dynamo_compiling():
        # Tangents are invisible in tracing. Without fullgraph, torch.compile then runs this again
        # untraced.
        raise _no_forward_mode("the call is compiled where they are computed")
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        dual = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call, unused-ignore]
        if dual.tangent is not None:
            raise _no_forward_mode("an input carries a tangent")


def check_no_function_transform(values: Iterable[Any]) -> None:
    """Refuses torch.func.grad and similar transforms, which need another form of the backward.

    Args:
        values: arguments of an op's autograd kernel; only tensors are checked.

    Raises:
        UnsupportedError: a transform of torch.func computes the gradient of one of them.
    """
    if not torch.is_grad_enabled():
        return
    for value in values:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        # A transform wraps each tensor that it differentiates.
        if torch.func.debug_unwrap(value, recurse=False) is not value:
            raise UnsupportedError(
                "torch.func: flash_attn_deterministic has no gradient for grad, vjp, jacrev and "
                "other transforms of torch.func; use backward() or torch.autograd.grad()"
            )


def _no_forward_mode(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"forward-mode AD: flash_attn_deterministic has no forward derivative (torch.func.jvp, "
        f"jacfwd, torch.autograd.forward_ad), and {why}; use backward() or torch.autograd.grad(), "
        "or detach the inputs"
    )
