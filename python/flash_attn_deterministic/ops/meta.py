"""Shapes, dtypes and strides of the ops' results, for tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..checks.ops import validate
from ..schemas import BACKWARD, FORWARD, SUMS, WITH_RESIDUAL, argument_names


def register(library: Any) -> None:
    """Registers the meta kernels, which fake tensors use too.

    torch.library.register_fake reads source files for its messages, which adds milliseconds to the
    import of the package.
    """
    for name in (*FORWARD, *BACKWARD, *SUMS):
        library.impl(name, _kernel(name), "Meta")


def _kernel(name: str) -> Callable[..., Any]:
    names = argument_names(name)
    results: Callable[..., Any]
    if name in FORWARD:
        results = _forward
    elif name in BACKWARD:
        results = _packed_backward if "qkv" in names else _backward
    else:
        others: dict[str, Callable[..., Any]] = {"finish_key_sums": _finish, "sink_bwd": _sink}
        results = others.get(name, _sums)

    def run(*arguments: Any) -> Any:
        # torch takes this kernel too if only one tensor of a call is a meta tensor, for instance k
        # of a q on a GPU. The result would be memory that no kernel has written.
        validate(name, arguments)
        outputs = results(**dict(zip(names, arguments, strict=False)))
        if name.endswith(WITH_RESIDUAL):
            return *outputs, outputs[0].new_empty(outputs[0].shape, dtype=torch.bfloat16)
        return outputs

    return run


# Results are contiguous, whatever the strides of q, k and v.


def _forward(q: Any, qkv: Any = None, v: Any = None, v_cache: Any = None, **others: Any) -> Any:
    if q is None:
        q = qkv.unbind(-3)[0]
    *tokens, nheads, head_dim = q.shape
    values = v if v_cache is None else v_cache
    if values is not None:
        head_dim = values.shape[-1]
    lse_shape = (*tokens[:-1], nheads, tokens[-1])
    out = q.new_empty((*tokens, nheads, head_dim))
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward(q: Any, k: Any, v: Any, **others: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _packed_backward(q: Any, qkv: Any, **others: Any) -> Any:
    return qkv.new_empty((0,) if q is None else q.shape), qkv.new_empty(qkv.shape)


def _sums(q: Any, k: Any, v: Any, **others: Any) -> Any:
    dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (k, v))
    return q.new_empty(q.shape), dk, dv


def _sink(learnable_sink: Any, **others: Any) -> Any:
    return learnable_sink.new_empty(learnable_sink.shape)


def _finish(dk_sums: Any, k: Any, **others: Any) -> Any:
    return k.new_empty(dk_sums.shape), k.new_empty(dk_sums.shape)
