"""The ops on CPU tensors: the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .._checks.values import check_values
from .schemas import (
    BACKWARD,
    FORWARD,
    WITH_RESIDUAL,
    Gradients,
    PackedGradients,
    argument_names,
    unpacked,
)

# Of the reference; the functions take what the ops take, by the same names. Tensors that hold q, k
# and v are taken apart.
_FUNCTIONS = {
    "fwd": "attention",
    "varlen_fwd": "varlen_attention",
    "kvcache_fwd": "kvcache_attention",
    "bwd": "attention_backward",
    "varlen_bwd": "varlen_attention_backward",
}


def register(library: Any) -> None:
    """Registers the CPU implementations."""
    for name in (*FORWARD, *BACKWARD):
        library.impl(name, _implementation(name), "CPU")


def _implementation(name: str) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # its import takes seconds
            return compute(*values)
        # torch.compile runs an op untraced, but traces its Python where it could not compile the
        # call of the op. Compiled code rounds otherwise than the reference.
        disable: Any = torch.compiler.disable
        return disable(compute)(*values)

    def compute(*values: Any) -> Any:
        # Imported here, to keep the package's import short.
        from .. import reference

        # torch leaves out arguments at the end that have their default.
        given = dict(zip(argument_names(name), values, strict=False))
        plain, arguments = unpacked(name, given)
        check_values(plain, arguments)
        arguments["window"] = (arguments.pop("window_left"), arguments.pop("window_right"))
        # The reference has one order for every backward, and no other for a forward than the split
        # tree: without `deterministic` it runs the tree of one split.
        arguments.pop("deterministic_bwd", None)
        if not arguments.pop("deterministic") and "split_size" in arguments:
            arguments["split_size"] = 0
        function = getattr(reference, _FUNCTIONS[plain])
        if name in BACKWARD:
            out, residual = arguments["out"], arguments.pop("residual", None)
            results = function(**{**arguments, "out": reference.restored(out, residual)})
        elif name.endswith(WITH_RESIDUAL):
            results = reference.with_residual(function, **arguments)
        else:
            results = function(**arguments)
        return _packed(given["q"], results) if name.endswith("qkvpacked_bwd") else results

    return run


def _packed(q: torch.Tensor | None, gradients: Gradients) -> PackedGradients:
    dq, dk, dv = gradients
    if q is None:
        return dq.new_empty(0), torch.stack((dq, dk, dv), -3)
    return dq, torch.stack((dk, dv), -3)
