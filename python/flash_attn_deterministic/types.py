"""The values that a call is made of, checked, with all defaults filled in."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

Tensor = torch.Tensor
# q, k and v, or (None, qkv), or (q, kv): the tensors that get gradients.
Inputs = tuple[Tensor, Tensor, Tensor] | tuple[Tensor | None, Tensor]
Outputs = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
# Of the backward: None and False follow the mode, "never" adds gradients atomically in every mode.
Deterministic = bool | Literal["never"] | None


class Options(NamedTuple):
    """The numbers and flags of a call, but for the last in the order of the ops' arguments.

    Args:
        dropout_p: 0.0: none.
        softmax_scale: factor of q k^T.
        window_left: how many keys before its own position a query sees; -1: no limit.
        window_right: the same after it; 0 for causal.
        softcap: 0.0: none.
        split_size: tokens per split; 0: one split.
        deterministic: whether the forward is.
        deterministic_bwd: whether the backward is.
        keep_residual: whether a call with a backward keeps the rounding error of out.
    """

    dropout_p: float
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    split_size: int
    deterministic: bool
    deterministic_bwd: bool
    keep_residual: bool = False


class Lengths(NamedTuple):
    """Where packed sequences begin and end; see `flash_attn_varlen_func`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    block_table: Tensor | None = None


# An op, by its name, and its arguments in the order of its schema.
Call = tuple[str, tuple[Any, ...]]
