"""Checked arguments of the ops, with all defaults filled in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """The numbers that define scores and mask, in the order of the ops' arguments.

    Args:
        softmax_scale: factor of q k^T.
        window_left: how many keys before its own position a query sees; -1: no limit.
        window_right: the same after it; 0 for causal.
        softcap: 0.0: none.
    """

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float


class Options(NamedTuple):
    """The numbers and flags of a call.

    Args:
        dropout_p: 0.0: none.
        scores: see `Scores`.
        split_size: tokens per split; 0: one split.
        deterministic: whether the forward is.
        deterministic_bwd: whether the backward is.
        keep_residual: whether a call with a backward keeps the rounding error of out.
    """

    dropout_p: float
    scores: Scores
    split_size: int
    deterministic: bool
    deterministic_bwd: bool
    keep_residual: bool = False


class Lengths(NamedTuple):
    """Where packed sequences begin and end; see `flash_attn_varlen_func`."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
