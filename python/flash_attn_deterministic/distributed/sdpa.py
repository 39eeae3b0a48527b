"""F.scaled_dot_product_attention over several ranks, within a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, UnsupportedError
from ..private import C
from .api import flash_attn_func
from .layout import ZIGZAG


class SdpaOverRanks(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Within the block, torch's scaled_dot_product_attention is `flash_attn_func` over ranks.

        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1]), SdpaOverRanks(mesh=mesh):
            loss = model(*buffers)

    Inside torch's `context_parallel`, which cuts tensors in the zigzag order and would run torch's
    ring attention; or anywhere, on tensors that `shard` has cut. A call with a mask, or another
    number of keys than queries under is_causal, raises an error.

    Args:
        group: as of `flash_attn_func`; mesh and order too.
        mesh: see group.
        order: see group.
    """

    def __init__(self, group: Any = None, mesh: Any = None, order: str = ZIGZAG) -> None:
        super().__init__()
        self._where: dict[str, Any] = {"group": group, "mesh": mesh, "order": order}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs a call; see torch.overrides.TorchFunctionMode."""
        if func is not C._nn.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise UnsupportedError("attn_mask: expected None over several ranks, got a tensor")
        if not query.dim() == key.dim() == value.dim() == 4:
            raise ArgumentError(
                f"query, key, value: expected 4 dimensions over several ranks, got shape "
                f"{tuple(query.shape)}"
            )
        if is_causal and query.shape[2] != key.shape[2]:
            raise UnsupportedError(
                f"is_causal: expected as many keys as queries, got {key.shape[2]} and "
                f"{query.shape[2]}: torch aligns this mask to the first key, these kernels to the "
                "last one"
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ArgumentError(
                f"key: expected {query.shape[1]} heads, as query, without enable_gqa, got "
                f"{key.shape[1]}"
            )
        # context_parallel makes DTensors of them, and takes either kind of result.
        tensors: list[Any] = [query, key, value]
        local = [one.to_local() if hasattr(one, "device_mesh") else one for one in tensors]
        q, k, v = (one.transpose(1, 2) for one in local)
        function: Any = flash_attn_func
        out: torch.Tensor = function(q, k, v, dropout_p, scale, is_causal, **self._where)
        return out.transpose(1, 2)
