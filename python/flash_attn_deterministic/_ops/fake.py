"""Shapes, dtypes and strides of the ops' results, for tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .schemas import (
    WITH_RESIDUAL,
    Gradients,
    Outputs,
    OutputsWithResidual,
    PackedGradients,
    parts_of,
)


def register(library: Any) -> None:
    """Registers the fake implementations."""
    # As kernels of meta tensors, which fake tensors use too: torch.library.register_fake reads
    # source files for its messages, which adds milliseconds to the import of the package.
    for name, forward in {
        "fwd": _dense,
        "varlen_fwd": _varlen_fwd,
        "qkvpacked_fwd": _qkvpacked_fwd,
        "varlen_qkvpacked_fwd": _varlen_qkvpacked_fwd,
    }.items():
        library.impl(name, forward, "Meta")
        library.impl(name + WITH_RESIDUAL, _with_residual(forward), "Meta")
    library.impl("kvcache_fwd", _dense, "Meta")
    library.impl("bwd", _bwd, "Meta")
    library.impl("varlen_bwd", _bwd, "Meta")
    library.impl("qkvpacked_bwd", _qkvpacked_bwd, "Meta")
    library.impl("varlen_qkvpacked_bwd", _qkvpacked_bwd, "Meta")
    library.impl("bwd_accumulate", _accumulate, "Meta")
    library.impl("varlen_bwd_accumulate", _accumulate, "Meta")
    library.impl("finish_key_sums", _finish, "Meta")


def _with_residual(forward: Callable[..., Outputs]) -> Callable[..., OutputsWithResidual]:
    def run(*arguments: Any) -> OutputsWithResidual:
        out, softmax_lse = forward(*arguments)
        return out, softmax_lse, out.new_empty(out.shape, dtype=torch.bfloat16)

    return run


def _dense(q: torch.Tensor, *others: Any) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    softmax_lse = q.new_empty((batch, nheads, seqlen_q), dtype=_lse_dtype(q))
    return q.new_empty(q.shape), softmax_lse


def _varlen_fwd(q: torch.Tensor, *others: Any) -> Outputs:
    total_q, nheads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((nheads, total_q), dtype=_lse_dtype(q))


def _bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
) -> Gradients:
    # Contiguous, whatever the strides of q, k and v.
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _qkvpacked_fwd(q: torch.Tensor | None, qkv: torch.Tensor, *others: Any) -> Outputs:
    return _dense(*parts_of(q, qkv))


def _varlen_qkvpacked_fwd(q: torch.Tensor | None, qkv: torch.Tensor, *others: Any) -> Outputs:
    return _varlen_fwd(*parts_of(q, qkv))


def _qkvpacked_bwd(
    dout: torch.Tensor, q: torch.Tensor | None, qkv: torch.Tensor, *others: Any
) -> PackedGradients:
    return qkv.new_empty((0,) if q is None else q.shape), qkv.new_empty(qkv.shape)


def _accumulate(dout: torch.Tensor, q: torch.Tensor, *others: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


def _finish(
    dk_sums: torch.Tensor, dv_sums: torch.Tensor, k: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*dk_sums.shape[:-2], *k.shape[-2:])
    return k.new_empty(shape), k.new_empty(shape)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
