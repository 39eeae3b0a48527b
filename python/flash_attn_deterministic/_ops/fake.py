"""Shapes, dtypes and strides of what the ops return, for tensors without data."""

from __future__ import annotations

from typing import Any

import torch

from .schemas import NAMESPACE, Gradients, Outputs


def register(library: Any) -> None:
    """Registers the fake implementations."""
    fakes: dict[str, Any] = {
        "fwd": _fwd,
        "varlen_fwd": _varlen_fwd,
        "kvcache_fwd": _kvcache_fwd,
        "bwd": _bwd,
        "varlen_bwd": _bwd,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


def _fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Outputs:
    return _dense(q)


def _varlen_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Outputs:
    total_q, nheads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((nheads, total_q), dtype=_lse_dtype(q))


def _kvcache_fwd(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *options: Any
) -> Outputs:
    return _dense(q)


def _bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> Gradients:
    # Contiguous, whatever the strides of q, k and v.
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _dense(q: torch.Tensor) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    softmax_lse = q.new_empty((batch, nheads, seqlen_q), dtype=_lse_dtype(q))
    return q.new_empty(q.shape), softmax_lse


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
