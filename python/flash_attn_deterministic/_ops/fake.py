"""Shapes, dtypes and strides of the ops' results, for tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from .schemas import (
    WITH_RESIDUAL,
    Gradients,
    Outputs,
    OutputsWithResidual,
    PackedGradients,
    argument_names,
    parts_of,
)


def register(library: Any) -> None:
    """Registers the fake implementations."""
    forward = {
        "fwd": _dense,
        "varlen_fwd": _varlen_fwd,
        "qkvpacked_fwd": _qkvpacked_fwd,
        "varlen_qkvpacked_fwd": _varlen_qkvpacked_fwd,
    }
    functions: dict[str, Callable[..., Any]] = {
        **forward,
        **{name + WITH_RESIDUAL: _with_residual(function) for name, function in forward.items()},
        "kvcache_fwd": _dense,
        "bwd": _bwd,
        "varlen_bwd": _bwd,
        "qkvpacked_bwd": _qkvpacked_bwd,
        "varlen_qkvpacked_bwd": _qkvpacked_bwd,
        "bwd_accumulate": _accumulate,
        "varlen_bwd_accumulate": _accumulate,
        "finish_key_sums": _finish,
    }
    # As kernels of meta tensors, which fake tensors use too: torch.library.register_fake reads
    # source files for its messages, which adds milliseconds to the import of the package.
    for name, function in functions.items():
        library.impl(name, _on_meta(name, function), "Meta")


def _on_meta(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # torch also takes this kernel if only one tensor of a call is a meta tensor, for instance k of
    # a q on a GPU. The result would be memory that no kernel has written.
    def run(*arguments: Any) -> Any:
        for argument, value in zip(argument_names(name), arguments, strict=False):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                raise ArgumentError(
                    f"{argument}: expected a tensor on the meta device, as another one of the "
                    f"call, got one on {value.device}"
                )
        return function(*arguments)

    return run


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
