"""Shapes, dtypes and strides of the ops' results, for tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..checks.ops import validate
from ..checks.tensors import cached_values
from ..schemas import BACKWARD, FORWARD, SUMS, argument_names, result_names


def register(library: Any) -> None:
    """Registers the meta kernels, which fake tensors use too.

    torch.library.register_fake reads source files for its messages, which adds milliseconds to the
    import of the package.
    """
    for name in (*FORWARD, *BACKWARD, *SUMS):
        library.impl(name, _kernel(name), "Meta")


def _kernel(name: str) -> Callable[..., Any]:
    names, results = argument_names(name), result_names(name)

    def run(*arguments: Any) -> Any:
        # torch takes this kernel too if only one tensor of a call is a meta tensor, for instance k
        # of a q on a GPU. The result would be memory that no kernel has written.
        validate(name, arguments)
        given = dict(zip(names, arguments, strict=False))
        made = [_empty(result, given) for result in results]
        return tuple(made) if len(made) > 1 else made[0]

    return run


def _empty(result: str, given: dict[str, Any]) -> Any:
    """Returns a tensor like a result, contiguous whatever the strides of q, k and v."""
    q = given.get("q")
    if result in ("out", "softmax_lse", "row_max", "residual"):
        keys = given.get("v")
        if "k_cache" in given:
            keys = cached_values(given["k_cache"], given["v_cache"])
        if q is None:
            q = given["qkv"].unbind(-3)[0]
        *tokens, nheads, head_dim = q.shape
        if result in ("softmax_lse", "row_max"):
            return q.new_empty((*tokens[:-1], nheads, tokens[-1]), dtype=torch.float32)
        shape = (*tokens, nheads, head_dim if keys is None else keys.shape[-1])
        return q.new_empty(shape, dtype=torch.bfloat16 if result == "residual" else q.dtype)
    if "dk_sums" in given:
        return given["k"].new_empty(given["dk_sums"].shape)
    if result == "dq" and q is None:
        return given["qkv"].new_empty(0)
    dtype = torch.float32 if result.endswith("_sums") else None
    like = given["learnable_sink" if result == "dsink" else result[1:].removesuffix("_sums")]
    return like.new_empty(like.shape, dtype=dtype)
