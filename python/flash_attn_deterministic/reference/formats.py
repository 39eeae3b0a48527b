"""The number format of each intermediate result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Rounding = torch.dtype | Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class Formats:
    """The number format of each intermediate result.

    A dtype rounds to it and back, a callable maps a tensor to the rounded tensor, None keeps the
    computing dtype (float64 for float64 inputs, otherwise float32).

    Args:
        scores: S = q k^T, once per block.
        probs: P on its way into P v; None is the input dtype, as in the kernels.
        row_max: the running maximum.
        row_sum: the running sum, after each block.
        rescale: the factor for row_sum and acc when the maximum moves.
        acc: the accumulator of P v, after each block.
        out: the normalised output, before it goes to the input dtype.
        dprobs: in the backward dP = dout v^T, once per block.
        dscores: in the backward dS on its way into dS k and dS^T q; None is the input dtype, as in
            the kernels. There, probs is also that of P on its way into P^T dout.
    """

    scores: Rounding = None
    probs: Rounding = None
    row_max: Rounding = None
    row_sum: Rounding = None
    rescale: Rounding = None
    acc: Rounding = None
    out: Rounding = None
    dprobs: Rounding = None
    dscores: Rounding = None

    def filled(self, dtype: torch.dtype) -> Formats:
        """Returns these formats, with None replaced where it stands for the input dtype."""
        probs = dtype if self.probs is None else self.probs
        return replace(self, probs=probs, dscores=dtype if self.dscores is None else self.dscores)


DEFAULT_FORMATS = Formats()


def round_to(values: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    if rounding is None or rounding is values.dtype:
        return values
    if isinstance(rounding, torch.dtype):
        return values.to(rounding).to(values.dtype)
    return rounding(values)
