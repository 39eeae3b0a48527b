"""How DTensors are sharded: along the batch, or along whole groups of heads (tensor parallelism).

Neither changes a bit, but that of a dropout mask, which depends on the head's index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..schemas import BACKWARD, FORWARD, argument_names, result_names

_OPS: Any = torch.ops.flash_attn_deterministic
_SHARED = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "rng_state")


def register() -> None:
    """Registers the strategies; this imports torch.distributed.tensor, which takes a second."""
    for name in (*FORWARD, *BACKWARD, "sink_bwd"):
        if name != "kvcache_fwd":
            register_sharding(getattr(_OPS, name).default)(_strategy(name))


def _strategy(name: str) -> Any:
    names, outputs = argument_names(name), result_names(name)

    def strategy(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(names, arguments, strict=False))
        varlen = given.get("cu_seqlens_q") is not None

        def placed(tensor: str, heads: bool) -> Any:
            spec: Any = given.get(tensor)
            if tensor in names and not hasattr(spec, "placements"):
                return None  # a number, or None
            if tensor in _SHARED:
                return Replicate()
            if tensor in ("learnable_sink", "dsink"):
                return Shard(0) if heads else Replicate()
            if heads:
                dims = 3 if varlen else 4
                if tensor in ("softmax_lse", "row_max", "dlse", "alibi_slopes"):
                    return Shard(len(spec.shape) - 1 if tensor == "alibi_slopes" else dims - 3)
                return Shard(dims - 1 if tensor in ("qkv", "dqkv") else dims - 2)
            if tensor == "alibi_slopes" and len(spec.shape) == 1:
                return Replicate()
            return Shard(0)

        def sharded(heads: bool) -> tuple[list[Any], list[Any]]:
            return [placed(n, heads) for n in outputs], [placed(n, heads) for n in given]

        everywhere = (
            [Replicate() for _ in outputs],
            [Replicate() if hasattr(spec, "placements") else None for spec in arguments],
        )
        if given.get("dropout_p", 0.0) > 0:
            return [everywhere]
        keys = given[next(key for key in ("qkv", "k", "out") if key in given)]
        whole_groups = keys.shape[-2] % keys.mesh.size() == 0
        kinds = [sharded(heads=True)] if whole_groups else []
        whole_batch = varlen or name == "sink_bwd"
        return [everywhere, *kinds, *([] if whole_batch else [sharded(heads=False)])]

    return strategy
