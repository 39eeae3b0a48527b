"""Refuses derivatives that there is no formula for, where torch would give zero or a riddle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import UnsupportedError


def check_no_tangent(values: Iterable[Any]) -> None:
    """Refuses forward-mode automatic differentiation, which torch would give a zero for.

    Args:
        values: arguments of an op; what is no tensor is passed over.

    Raises:
        UnsupportedError: one of them carries a tangent, of torch.func.jvp for instance, or
            torch.compile traces this where tangents may exist.
    """
    # A private name; but asking each tensor instead takes microseconds of every call.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if torch.compiler.is_dynamo_compiling():
        # What torch.compile traces shows no tangents. If it can go on without a graph of this, it
        # runs this again as it stands.
        raise _no_forward_mode("the call is compiled where they are computed")
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        dual = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call, unused-ignore]
        if dual.tangent is not None:
            raise _no_forward_mode("an input carries a tangent")


def check_no_function_transform(values: Iterable[Any]) -> None:
    """Refuses torch.func.grad and its kin, which need another form of the backward.

    Args:
        values: arguments of an op at the level of its autograd; see `check_no_tangent`.

    Raises:
        UnsupportedError: a gradient of one of them is wanted by a transform of torch.func.
    """
    if not torch.is_grad_enabled():
        return
    for value in values:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        # A transform puts a tensor of its own around each that it follows.
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
