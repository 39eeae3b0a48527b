"""The ops on CPU tensors: the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..checks.ops import validate
from ..schemas import BACKWARD, FORWARD, SUMS, WITH_RESIDUAL, WITH_ROW_MAX, argument_names, unpacked

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
    for name in (*FORWARD, *BACKWARD, *SUMS):
        library.impl(name, _kernel(name), "CPU")


def _kernel(name: str) -> Callable[..., Any]:
    def checked(*values: Any) -> Any:
        validate(name, values, read_values=True)
        # torch omits trailing arguments that have their default value.
        return _compute(name, dict(zip(argument_names(name), values, strict=False)))

    def run(*values: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # its import takes seconds
            return checked(*values)
        # torch.compile does not trace into an op, but does trace this function where it could not
        # compile the call of the op. Compiled code would round differently.
        disable: Any = torch.compiler.disable
        return disable(checked)(*values)

    return run


def _compute(name: str, given: dict[str, Any]) -> Any:
    # Imported here, to keep the package's import short.
    from .. import reference

    if name == "finish_key_sums":
        sums = given["dk_sums"], given["dv_sums"]
        return reference.finish_key_sums(sums, given["k"], given["softmax_scale"])
    if "out" in given:
        given["out"] = reference.restored(given["out"], given.pop("residual", None))
    if name == "sink_bwd":
        given.pop("max_seqlen_q")
        return reference.sink_backward(**given)
    if name == "varlen_bwd_sums":
        return reference.varlen_attention_backward(**_renamed(given), unrounded=True)
    plain, arguments = unpacked(name, given)
    function = getattr(reference, _FUNCTIONS[plain])
    if WITH_ROW_MAX in name:
        arguments["return_row_max"] = True
    if name.endswith(WITH_RESIDUAL):
        return reference.with_residual(function, **_renamed(arguments))
    results = function(**_renamed(arguments))
    if not name.endswith("qkvpacked_bwd"):
        return results
    dq, dk, dv = results
    if given["q"] is None:
        return dq.new_empty(0), torch.stack((dq, dk, dv), -3)
    return dq, torch.stack((dk, dv), -3)


def _renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns an op's arguments as the reference takes them."""
    arguments["window"] = (arguments.pop("window_left"), arguments.pop("window_right"))
    # The reference has one order of additions in the backward, and only the split tree in the
    # forward: without `deterministic` it has one split.
    arguments.pop("deterministic_bwd", None)
    arguments.pop("residual", None)  # in out
    if not arguments.pop("deterministic") and "split_size" in arguments:
        arguments["split_size"] = 0
    return arguments
