"""torch.func.vmap over the batch: the vmapped dimension becomes part of the ops' own one.

A row's bits do not depend on the batch, so these are the bits of a loop. Packed sequences and
caches are refused: torch would loop over the op, or copy the cache that a call writes to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedError
from ..schemas import BACKWARD, FORWARD, NAMESPACE, argument_names


def register(library: Any) -> None:
    """Registers the rule of each op."""
    for name in (*FORWARD, *BACKWARD):
        packed = "varlen" in name or name == "kvcache_fwd"
        rule = _refuse(name) if packed else _rule(name)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=library)


def _refuse(name: str) -> Callable[..., Any]:
    kind = "a cache" if name == "kvcache_fwd" else "packed sequences"

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        raise UnsupportedError(
            f"torch.func.vmap: there is no rule for {kind}; call it once for each element"
        )

    return rule


def _rule(name: str) -> Callable[..., Any]:
    names = argument_names(name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        size = info.batch_size
        given = dict(zip(names, arguments, strict=False))
        dims = dict(zip(names, in_dims, strict=False))
        state = given["rng_state"]
        seeds = state is not None and state.dim() - (dims["rng_state"] is not None) == 2
        if given["dropout_p"] > 0 and not seeds:
            raise UnsupportedError(
                f"torch.func.vmap: expected dropout_p 0.0, got {given['dropout_p']}: the mask of a "
                "sequence depends on its index in the batch; pass dropout_seeds"
            )
        if dims.get("learnable_sink") is not None:
            raise UnsupportedError(
                "learnable_sink: expected one tensor for all elements of torch.func.vmap, got one "
                "for each; call it once for each element"
            )
        by_element = {
            argument: x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for (argument, x), dim in zip(given.items(), in_dims, strict=False)
            if isinstance(x, torch.Tensor) and argument != "learnable_sink"
        }
        batch = by_element["qkv" if given["q"] is None else "q"].shape[1]
        slopes = by_element.get("alibi_slopes")
        if slopes is not None:
            if slopes.dim() == 2:  # the same for all sequences of an element
                slopes = slopes[:, None]
            by_element["alibi_slopes"] = slopes.expand(size, batch, slopes.shape[-1])
        given |= {argument: x.flatten(0, 1) for argument, x in by_element.items()}
        if seeds:
            given["rng_state"] = given["rng_state"].contiguous()
        results = getattr(torch.ops.flash_attn_deterministic, name)(*given.values())
        shared = [result.numel() == 0 and result.dim() == 1 for result in results]  # an absent dq
        split = [
            result if one else result.unflatten(0, (size, batch))
            for result, one in zip(results, shared, strict=True)
        ]
        return tuple(split), tuple(None if one else 0 for one in shared)

    return rule
