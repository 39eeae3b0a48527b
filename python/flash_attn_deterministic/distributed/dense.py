"""Attention over sequences of one length that are distributed over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..types import Deterministic
from .call import attend, check_packed, checked, resolve
from .dtensor import with_dtensors
from .messages.groups import find_groups
from .planning.layout import CONTIGUOUS


@with_dtensors
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
    group: Any = None,
    heads_group: Any = None,
    mesh: Any = None,
    order: str = CONTIGUOUS,
    heads_k_stride: int | None = None,
) -> Any:
    """Computes `flash_attn_deterministic.flash_attn_func` of sequences on several ranks.

    Each rank passes its tokens and gets its rows of the result. For any number of ranks these, and
    dq, dk and dv, have the bits of one device. All ranks of the groups have to make the same calls
    in the same order, backward included.

    The tokens on the P ranks of `group`, for P = 2 and a sequence of 8 tokens:

        order="contiguous"   rank 0: 0 1 2 3   rank 1: 4 5 6 7
        order="zigzag"       rank 0: 0 1 6 7   rank 1: 2 3 4 5

    Under a causal mask, the zigzag order gives all ranks the same work. `shard` cuts a tensor in
    either order.

    With `heads_group`, an all-to-all before attention gives each of its ranks all their tokens for
    some of the heads, and another one after it reverses that. With both groups, the ranks of
    heads_group together hold the tokens of one rank of `group`, one after another.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), the tokens of this rank; equally many on each rank.
            Masks are aligned to the whole sequence.
        k: (batch, seqlen_k, nheads_k, head_dim), likewise.
        v: like k.
        dropout_p: has to be 0.0.
        softmax_scale: as on one device; so are the arguments after it that are not listed here.
        alibi_slopes: has to be None.
        return_attn_probs: whether to return softmax_lse as well.
        group: process group over which each sequence is distributed; None: all ranks, or, if
            heads_group is given, this rank alone. Its backend is gloo for tensors on the CPU, NCCL
            for CUDA devices.
        heads_group: process group over which heads are distributed; its size divides nheads_k.
        mesh: instead of groups, a DeviceMesh of one dimension (sequence) or two (sequence, heads).
        order: "contiguous" or "zigzag".
        heads_k_stride: KV heads whose keys are gathered at a time, the same on all ranks; None: one
            in the backward; in the forward half of them, or fewer if these have more than 256 MB of
            keys and values on all ranks, but at least one. No bit depends on it.

    Returns:
        out (batch, seqlen_q, nheads, head_dim); with return_attn_probs the tuple of out,
        softmax_lse (batch, nheads, seqlen_q) in float32 and an empty tensor (0,).

        If q, k and v are DTensors, out is one too, placed like q. Tokens (dimension 1) have to be
        sharded over one dimension of their mesh, which then is `group`; batch and heads may be
        sharded over others.

    Raises:
        As on one device, and:
        ArgumentError: an argument or a shape differs between ranks, only some of them want a
            gradient, heads or tokens don't divide by the ranks, or there is no process group.
        UnsupportedError: dropout, ALiBi, a mode with keep_residual where an input requires a
            gradient, or a group with another backend.
        RankError: a RuntimeError; another rank has ended, failed, or not answered within the
            group's timeout. From the backward as well.

    Source:
        Keys gathered before attention: Llama 3 (arXiv 2407.21783, section 3.3.2). Heads: DeepSpeed
        Ulysses (arXiv 2309.14509). Zigzag: ring-flash-attention; striped attention (arXiv
        2311.09431) before it.
    """
    groups = find_groups(group, heads_group, mesh)

    def prepare() -> Any:
        scores = softmax_scale, causal, window_size, softcap
        options = dropout_p, *scores, split_size, deterministic
        return resolve(
            groups, q, k, v, None, options, alibi_slopes, order, heads_k_stride, return_attn_probs
        )

    options, settings = checked(groups, (q, k, v), prepare)
    return attend(q, k, v, None, None, options, settings)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes `flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), the tokens of this rank.
        args: those of `flash_attn_func` after v.
        kwargs: likewise.

    Returns:
        As `flash_attn_func`.

    Raises:
        As `flash_attn_func`.
    """
    check_packed("qkv", qkv, "(batch, seqlen, 3, nheads, head_dim)", kwargs)
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes `flash_attn_func` with k and v in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), the tokens of this rank.
        kv: (batch, seqlen_k, 2, nheads_k, head_dim), likewise.
        args: those of `flash_attn_func` after v.
        kwargs: likewise.

    Returns:
        As `flash_attn_func`.

    Raises:
        As `flash_attn_func`.
    """
    check_packed("kv", kv, "(batch, seqlen_k, 2, nheads_k, head_dim)", kwargs)
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)
