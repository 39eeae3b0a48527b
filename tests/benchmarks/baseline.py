"""Upstream's own kernels, for comparisons."""

from flash_attn_deterministic.verify.speed.upstream import (
    HEAD_DIMS,
    Baseline,
    BaselineError,
    Packed,
    Scores,
)

__all__ = ["HEAD_DIMS", "Baseline", "BaselineError", "Packed", "Scores"]
