"""The functions of one device, over sequences that are distributed over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checks.numbers import as_flag, as_int
from ..checks.ops import validate
from ..checks.tensors import PACKED
from ..errors import ArgumentError, UnsupportedError
from ..interface.call import WithProbs, as_sink, has_backward, padded, resolve_options, with_ints
from ..schemas import forward_call
from ..types import Deterministic, Lengths
from . import ops
from .calls import of_kv, of_qkv, of_varlen_qkv
from .dtensor import with_dtensors
from .layout import CONTIGUOUS, check_order
from .ops import CallSpec
from .plan import Explanation
from .ranks import Ranks, find_group

_MOST = 1024  # calls of a group that are remembered as valid


def _attend(
    ranks: Ranks,
    inputs: tuple[Any, ...],
    lengths: Lengths | None,
    options: tuple[Any, ...],
    how: tuple[Any, ...],
    alibi_slopes: Any,
    learnable_sink: Any,
    return_attn_probs: Any,
) -> torch.Tensor | WithProbs:
    """Checks a call and runs it; lengths are those of packed sequences.

    `options` are the arguments of `resolve_options` after head_dim; `how` are order,
    heads_k_stride and ulysses_degree.
    """
    sink = None if learnable_sink is None else as_sink(learnable_sink)
    spec = _resolve(ranks, inputs, lengths, options, how, alibi_slopes, sink)
    with_lse = as_flag("return_attn_probs", return_attn_probs)
    width = inputs[2].shape[-1]
    head_dim = max(inputs[0].shape[-1], width)  # ranks exchange tensors of one
    starts_q, starts_k = (None, None) if lengths is None else lengths[:2]
    q, k, v = (padded(one, head_dim) for one in inputs)
    out, softmax_lse = ops.run("sequence_fwd", q, k, v, sink, starts_q, starts_k, *spec)
    if out.shape[-1] != width:
        out = out[..., :width]
    return (out, softmax_lse, out.new_empty(0)) if with_lse else out


def _resolve(
    ranks: Ranks,
    inputs: tuple[Any, ...],
    lengths: Lengths | None,
    options: tuple[Any, ...],
    how: tuple[Any, ...],
    alibi_slopes: Any = None,
    sink: Any = None,
) -> CallSpec:
    """Checks a call, unless one with such arguments has been; see `_attend`."""
    q, k, _ = inputs
    _, found = resolve_options(q, *options)
    lengths = None if lengths is None else with_ints(lengths, same=False)
    starts, longest = (lengths or ())[:2], (lengths or ())[2:4]
    try:
        key = None
        if not torch.compiler.is_compiling():
            key = *map(_kind_of, (*inputs, sink, alibi_slopes, *starts)), longest, found
            key = *key, torch.is_grad_enabled(), how, *map(type, how)
        if key in ranks.valid:
            known: CallSpec = ranks.valid[key]
            return known
    except (AttributeError, TypeError, RuntimeError):
        key = None  # an argument of a wrong type
    validate(*forward_call(inputs, lengths, found, None, learnable_sink=sink))
    ranks.check(q.device)
    if found.dropout_p > 0:
        raise UnsupportedError(
            f"dropout_p: expected 0.0 on several ranks, got {found.dropout_p}: the mask of a "
            "sequence depends on its index in the call, which differs between ranks"
        )
    if alibi_slopes is not None:
        raise UnsupportedError(
            "alibi_slopes: expected None on several ranks: the ops measure distances from the last "
            "row of their own tensor"
        )
    backward = has_backward(inputs, None)
    if sink is not None and sink.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "learnable_sink: expected one that requires no gradient on several ranks: its gradient "
            "is a sum over the rows of all ranks, which they don't exchange; pass "
            "learnable_sink.detach()"
        )
    if found.keep_residual and backward:
        raise UnsupportedError(
            "keep_residual: expected False on several ranks where q, k or v requires a gradient, "
            "got True: the backward over ranks has no argument for the residual; make the call "
            "inside deterministic_mode(keep_residual=False)"
        )
    order, heads_k, degree = how
    nheads_k = k.shape[-2]
    if heads_k is not None:
        heads_k = as_int("heads_k_stride", heads_k)
        if not 1 <= heads_k <= nheads_k:
            raise ArgumentError(f"heads_k_stride: expected 1 to {nheads_k}, got {heads_k}")
    if degree is not None:
        degree = as_int("ulysses_degree", degree)
        if degree < 1 or ranks.size % degree or nheads_k % degree:
            raise ArgumentError(
                f"ulysses_degree: expected a divisor of {ranks.size} ranks and of {nheads_k} KV "
                f"heads, got {degree}"
            )
    order = check_order(order)
    has_sink = sink is not None
    numbers = degree or 0, heads_k or 0, backward, has_sink, *found[1:8]
    spec = CallSpec(ranks.name, order, *numbers)
    if key is not None:
        if len(ranks.valid) >= _MOST:
            ranks.valid.clear()
        ranks.valid[key] = spec
    return spec


def _kind_of(tensor: Any) -> Any:
    """Returns all of a tensor that the checks of a call depend on."""
    if tensor is None:
        return None
    place = tensor.dtype, tensor.device, tensor.layout
    return type(tensor), tensor.shape, *place, tensor.requires_grad


@with_dtensors(tokens=1)
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
    learnable_sink: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    order: str = CONTIGUOUS,
    heads_k_stride: int | None = None,
    ulysses_degree: int | None = None,
) -> torch.Tensor | WithProbs:
    """Computes `flash_attn_deterministic.flash_attn_func` of sequences on several ranks.

    Each rank passes its tokens and gets its rows of the result. For any number of ranks these, and
    dq, dk and dv, have the bits of one device. All ranks of the groups have to make the same calls
    in the same order, backward included.

    The tokens on the P ranks of `group`, for P = 2 and a sequence of 8 tokens:

        order="contiguous"   rank 0: 0 1 2 3   rank 1: 4 5 6 7
        order="zigzag"       rank 0: 0 1 6 7   rank 1: 2 3 4 5

    Under a causal mask, the zigzag order gives all ranks the same work. `shard` cuts a tensor in
    either order.

    Where heads are divided over ranks, an all-to-all gives each of them some heads of all their
    tokens. `explain` tells what a call does, and why.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), the tokens of this rank; equally many on each rank.
            Masks are aligned to the whole sequence.
        k: (batch, seqlen_k, nheads_k, head_dim), likewise.
        v: like k.
        dropout_p: has to be 0.0.
        softmax_scale: as on one device; so are the arguments after it that are not listed here.
        alibi_slopes: has to be None.
        return_attn_probs: whether to return softmax_lse as well.
        learnable_sink: as on one device, the same on all ranks; it may not require a gradient.
        group: process group over which the tokens are distributed; None: all ranks. Its backend is
            gloo for tensors on the CPU, NCCL for CUDA devices.
        mesh: instead of a group, a DeviceMesh of one dimension.
        order: "contiguous" or "zigzag".
        heads_k_stride: KV heads that a rank computes at a time, while the next ones come; None:
            chosen from the sizes. No bit depends on it.
        ulysses_degree: ranks over which heads are divided; it divides the ranks and nheads_k. None:
            chosen from the sizes; 1: heads are not divided. No bit depends on it.

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
        UnsupportedError: dropout, ALiBi, a gradient of learnable_sink, or one with rows that see no
            key, a mode with keep_residual where an input requires a
            gradient, or a group with another backend.
        RankError: a RuntimeError; another rank has ended, failed, or not answered within the
            group's timeout. From the backward as well. See docs/distributed.md for what is found
            when, and whether the group can be used afterwards.

    Source:
        Keys gathered before attention: Llama 3 (arXiv 2407.21783, section 3.3.2). Heads: DeepSpeed
        Ulysses (arXiv 2309.14509). Zigzag: ring-flash-attention; striped attention (arXiv
        2311.09431) before it.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    how = order, heads_k_stride, ulysses_degree
    others = alibi_slopes, learnable_sink, return_attn_probs
    ranks = Ranks.of(find_group(group, mesh))
    return _attend(ranks, (q, k, v), None, options, how, *others)


flash_attn_qkvpacked_func = of_qkv(flash_attn_func, PACKED[3, False])
flash_attn_kvpacked_func = of_kv(flash_attn_func, PACKED[2, False])


@with_dtensors(tokens=0)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    split_size: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    order: str = CONTIGUOUS,
    heads_k_stride: int | None = None,
    ulysses_degree: int | None = None,
) -> torch.Tensor | WithProbs:
    """Computes `flash_attn_deterministic.flash_attn_varlen_func` of tokens on several ranks.

    cu_seqlens are those of the tokens of all ranks. In the contiguous order rank r holds the r-th
    of P parts of these, and a sequence may begin on one rank and end on another. In the zigzag
    order each sequence is cut as `flash_attn_func` shows, into parts of equally many rows; rows
    after its last token belong to no sequence.

    The host reads cu_seqlens, and waits for those on a CUDA device, once while a tensor lives.

    Args:
        q: (total_q, nheads, head_dim), the tokens of this rank; equally many on each rank.
        k: (total_k, nheads_k, head_dim), likewise.
        v: like k.
        cu_seqlens_q: (batch + 1,), int32: tokens of all ranks before each sequence, and their
            total; in the contiguous order the total may be less than that of all ranks.
        cu_seqlens_k: (batch + 1,), int32, the same for k.
        max_seqlen_q: no effect: the host reads the lengths.
        max_seqlen_k: no effect.
        dropout_p: has to be 0.0.
        softmax_scale: as on one device; so are the arguments after it that are not listed here.
        alibi_slopes: has to be None.
        return_attn_probs: whether to return softmax_lse as well.
        block_table: has to be None.
        learnable_sink: as in `flash_attn_func`; so are the arguments after it.

    Returns:
        out (total_q, nheads, head_dim); with return_attn_probs the tuple of out, softmax_lse
        (nheads, total_q) in float32 and an empty tensor (0,). Rows of no sequence: out 0,
        softmax_lse +inf.

    Raises:
        As `flash_attn_func`.

    Source:
        As `flash_attn_func`.
    """
    if block_table is not None:
        raise UnsupportedError("block_table: expected None on several ranks")
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    how = order, heads_k_stride, ulysses_degree
    others = alibi_slopes, learnable_sink, return_attn_probs
    ranks = Ranks.of(find_group(group, mesh))
    return _attend(ranks, (q, k, v), lengths, options, how, *others)


flash_attn_varlen_qkvpacked_func = of_varlen_qkv(flash_attn_varlen_func, PACKED[3, True])
flash_attn_varlen_kvpacked_func = of_kv(flash_attn_varlen_func, PACKED[2, True])


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    *,
    split_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    order: str = CONTIGUOUS,
    heads_k_stride: int | None = None,
    ulysses_degree: int | None = None,
) -> Explanation:
    """Returns how a call is divided over ranks, without messages.

    Args:
        q: as in `flash_attn_func`, or with cu_seqlens as in `flash_attn_varlen_func`; so are the
            other arguments.

    Raises:
        As `flash_attn_func`, but for RankError.
    """
    ranks = Ranks.of(find_group(group, mesh))
    lengths = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    options = 0.0, None, causal, window_size, 0.0, split_size, None
    how = order, heads_k_stride, ulysses_degree
    spec = _resolve(ranks, (q, k, k), lengths, options, how)
    return ops.known(ranks, q, k, (cu_seqlens_q, cu_seqlens_k), spec).plan.chosen
