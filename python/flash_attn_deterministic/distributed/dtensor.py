"""q, k and v as DTensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError
from .calls import reported
from .ranks import group_of_dimension


def with_dtensors(tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a function take DTensors, whose placements give the group; tells ranks of its errors.

    `tokens` is the dimension of q, k and v that needs messages: 1, or 0 of packed sequences. Others
    but the last are independent.
    """
    return lambda function: reported(_wrapped(function, tokens))


def _wrapped(function: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    of_group = reported(function)  # whose errors need not be told in all groups

    @functools.wraps(function)
    def wrapped(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        # Not imported here, as that takes a second: no tensor is a DTensor before the import.
        DTensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        are = [isinstance(tensor, DTensor) for tensor in (q, k, v)]
        if not any(are):
            return function(q, k, v, *args, **kwargs)
        if not all(are):
            raise ArgumentError("q, k, v: expected three DTensors or none, got both kinds")
        mesh, group = _sequence_group(q, k, v, kwargs, tokens)
        local = (tensor.to_local() for tensor in (q, k, v))
        result = of_group(*local, *args, **{**kwargs, "group": group})
        out = result[0] if isinstance(result, tuple) else result
        placed = DTensor.from_local(out, mesh, q.placements, run_check=False)
        return (placed, *result[1:]) if isinstance(result, tuple) else placed

    return wrapped


def _sequence_group(
    q: Any, k: Any, v: Any, options: dict[str, Any], tokens: int
) -> tuple[Any, Any]:
    independent = [one for one in range(tokens + 2) if one != tokens]
    for name in ("group", "mesh"):
        if options.get(name) is not None:
            raise ArgumentError(f"{name}: expected None with DTensors, whose mesh is used")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device_mesh != q.device_mesh or tensor.placements != q.placements:
            raise ArgumentError(
                f"{name}: expected the mesh and the placements of q, {q.placements}, got "
                f"{tensor.placements}"
            )
    found = []
    for number, placement in enumerate(q.placements):
        if placement.is_shard(tokens):
            found.append(number)
        elif not placement.is_replicate() and not any(map(placement.is_shard, independent)):
            shards = ", ".join(f"Shard({dimension})" for dimension in range(tokens + 2))
            raise ArgumentError(
                f"q: expected the placements {shards} and Replicate(), got {placement}"
            )
    if len(found) != 1:
        raise ArgumentError(
            f"q: expected tokens (dimension {tokens}) sharded over one dimension of the mesh, got "
            f"{q.placements}; if they are on every rank, call the function of one device with "
            "to_local()"
        )
    return q.device_mesh, group_of_dimension(q.device_mesh, found[0])
