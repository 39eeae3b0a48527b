"""The rounding error of out, for a backward that adds it to out.

The backward subtracts D, the sum of dout * out over a row, from numbers that are close to D where
keys are alike: rounding out to 16 bit then costs dq most of its digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .formats import DEFAULT_FORMATS

Outputs = tuple[torch.Tensor, torch.Tensor]


def with_residual(
    attention: Callable[..., Outputs], q: torch.Tensor, *tensors: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention, and the rounding error of out.

    Args:
        attention: `attention` or `varlen_attention`.
        q: as there.
        *tensors: the arguments after q there.
        **options: as there.

    Returns:
        out and softmax_lse as there, bit for bit, and the residual: unrounded out minus out, shaped
        like it, in bfloat16.
    """
    # With q in float32, out is not rounded; all other steps round as for q's dtype.
    options["formats"] = options.get("formats", DEFAULT_FORMATS).filled(q.dtype)
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    exact, softmax_lse = attention(wide, *tensors, **options)
    out = exact.to(q.dtype)
    out.masked_fill_(out.isnan(), float("nan"))
    return out, softmax_lse, (exact - out).to(torch.bfloat16)


def restored(out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns out for the backward: in float32 with its residual, if there is one."""
    return out if residual is None else out.float() + residual
