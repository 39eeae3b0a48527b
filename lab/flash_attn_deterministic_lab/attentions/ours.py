"""flash-attn-deterministic, by its public functions alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .attention import Function
from .interface import arguments, call, imported


def make(*, reference: bool = False, residual: bool = False, **fixed: Any) -> Function:
    """Imports it, and returns its attention.

    Args:
        reference: whether the CPU computes, whatever the tensors' device.
        residual: whether the rounding error of out is kept for the backward.
        **fixed: arguments of every call.
    """
    package = imported("flash_attn_deterministic")

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        device, given = q.device, arguments(options) | fixed
        if reference:
            q, k, v = q.cpu(), k.cpu(), v.cpu()
            given = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in given.items()}
        if not residual:
            return call(package, q, k, v, given).to(device)
        with package.deterministic_mode(True, keep_residual=True):
            return call(package, q, k, v, given).to(device)

    return attend
