"""The ops on CPU tensors: the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .._checks.index_values import check_values
from .._checks.varlen import NAMES, NAMES_QKV
from ..errors import UnsupportedError
from .schemas import (
    BACKWARD,
    FORWARD,
    WITH_RESIDUAL,
    Gradients,
    PackedGradients,
    argument_names,
    unpacked,
)

# The reference's function of each op, with the same argument names. Packed tensors are split first.
_FUNCTIONS = {
    "fwd": "attention",
    "varlen_fwd": "varlen_attention",
    "kvcache_fwd": "kvcache_attention",
    "bwd": "attention_backward",
    "varlen_bwd": "varlen_attention_backward",
}


def register(library: Any) -> None:
    """Registers the CPU implementations."""
    for name in (*FORWARD, *BACKWARD, "varlen_bwd_accumulate"):
        library.impl(name, _implementation(name), "CPU")
    library.impl("finish_key_sums", _untraced(_finish_key_sums), "CPU")


def _implementation(name: str) -> Callable[..., Any]:
    def compute(*values: Any) -> Any:
        # Imported here, to keep the package's import short.
        from .. import reference

        # torch omits trailing arguments that have their default value.
        given = dict(zip(argument_names(name), values, strict=False))
        plain, arguments = unpacked(name, given)
        check_values(plain, arguments, NAMES_QKV if given["q"] is None else NAMES)
        arguments["window"] = (arguments.pop("window_left"), arguments.pop("window_right"))
        # The reference has one order of additions in the backward, and only the split tree in the
        # forward: without `deterministic` it has one split.
        arguments.pop("deterministic_bwd", None)
        if not arguments.pop("deterministic") and "split_size" in arguments:
            arguments["split_size"] = 0
        if "out" in arguments:
            out, residual = arguments["out"], arguments.pop("residual", None)
            arguments["out"] = reference.restored(out, residual)
        if name == "varlen_bwd_accumulate":
            arguments["sums"] = (arguments.pop("dk_sums"), arguments.pop("dv_sums"))
            return reference.varlen_attention_backward(**arguments)[0]
        function = getattr(reference, _FUNCTIONS[plain])
        if name.endswith(WITH_RESIDUAL):
            results = reference.with_residual(function, **arguments)
        else:
            results = function(**arguments)
        return _packed(given["q"], results) if name.endswith("qkvpacked_bwd") else results

    return _untraced(compute)


def _untraced(compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # its import takes seconds
            return compute(*values)
        # torch.compile does not trace into an op, but does trace this function where it could not
        # compile the call of the op. Compiled code would round differently.
        disable: Any = torch.compiler.disable
        return disable(compute)(*values)

    return run


def _finish_key_sums(
    dk_sums: torch.Tensor,
    dv_sums: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .. import reference

    if dropout_p > 0:
        raise UnsupportedError(f"dropout_p: expected 0.0 for CPU tensors, got {dropout_p}")
    return reference.finish_key_sums((dk_sums, dv_sums), k, softmax_scale)


def _packed(q: torch.Tensor | None, gradients: Gradients) -> PackedGradients:
    dq, dk, dv = gradients
    if q is None:
        return dq.new_empty(0), torch.stack((dq, dk, dv), -3)
    return dq, torch.stack((dk, dv), -3)
