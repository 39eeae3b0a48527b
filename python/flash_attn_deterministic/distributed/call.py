"""The steps that the dense and the packed functions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..checks import tensors
from ..checks.numbers import as_flag, as_int
from ..checks.ops import validate
from ..errors import ArgumentError, FlashAttnError, UnsupportedError
from ..interface.call import has_backward, padded, resolve_options, with_ints
from ..schemas import forward_call
from ..types import Lengths, Options
from . import ops

# Defines the ops.
from .messages import agreement
from .messages.groups import Groups, find_groups
from .planning.layout import ORDERS, check_order

_Result = TypeVar("_Result")


class Settings(NamedTuple):
    """The options that only a distributed call has.

    Args:
        groups: of ranks.
        order: index in ORDERS.
        heads_k: KV heads to gather at a time; 0: chosen from the sizes.
        with_lse: whether softmax_lse is returned.
    """

    groups: Groups
    order: int
    heads_k: int
    with_lse: bool


def checked(groups: Groups, given: Sequence[Any], prepare: Callable[[], _Result]) -> _Result:
    """Runs the checks of a call, and reports an error to the other ranks.

    Args:
        groups: of ranks.
        given: unchecked arguments; messages go over the device of the first tensor.
        prepare: raises if the arguments are wrong.
    """
    if torch.compiler.is_compiling():
        return prepare()
    try:
        return prepare()
    except FlashAttnError as error:
        device = next((one.device for one in given if isinstance(one, torch.Tensor)), None)
        for ranks in (groups.heads, groups.sequence):
            if ranks.size > 1 and device is not None and device.type in ("cpu", "cuda"):
                agreement.report(ranks, error, device)
        raise


def check_packed(name: str, tensor: torch.Tensor, layout: str, options: Mapping[str, Any]) -> None:
    """Checks a packed tensor as `checks.tensors.check_packed` does; reports as `checked`.

    Args:
        name: of the argument.
        tensor: the argument.
        layout: expected.
        options: keyword arguments of the call, with the groups.
    """
    groups = find_groups(*(options.get(one) for one in ("group", "heads_group", "mesh")))
    checked(groups, (tensor,), lambda: tensors.check_packed(name, tensor, layout))


def resolve(
    groups: Groups,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths | None,
    options: tuple[Any, ...],
    alibi_slopes: Any,
    order: Any,
    heads_k_stride: Any,
    return_attn_probs: Any,
) -> tuple[Options, Settings]:
    """Checks a call.

    Args:
        groups: of ranks.
        q: the argument; k and v too.
        k: see q.
        v: see q.
        lengths: of packed sequences; None: dense.
        options: arguments of `resolve_options` after head_dim.
        alibi_slopes: has to be None.
        order: the argument.
        heads_k_stride: the argument.
        return_attn_probs: the argument.

    Raises:
        ArgumentError: a wrong value; ArgumentTypeError: a wrong type.
        UnsupportedError: dropout, ALiBi, a mode with keep_residual where a gradient is wanted, or a
            group whose backend can't send the tensors.
    """
    _, found = resolve_options(q, *options)
    lengths = None if lengths is None else with_ints(lengths, same=False)
    validate(*forward_call((q, k, v), lengths, found, None))
    groups.check(q.device)
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
    if found.keep_residual and has_backward((q, k, v), None):
        raise UnsupportedError(
            "keep_residual: expected False on several ranks where q, k or v requires a gradient, "
            "got True: the backward over ranks has no argument for the residual; make the call "
            "inside deterministic_mode(keep_residual=False)"
        )
    order = check_order(order)
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    size = groups.heads.size
    if nheads_k % size:
        raise ArgumentError(
            f"k: expected a number of heads that divides by the {size} ranks of the heads' group, "
            f"got {nheads_k} (for {nheads} query heads)"
        )
    heads_k = 0
    if heads_k_stride is not None:
        heads_k = as_int("heads_k_stride", heads_k_stride)
    if heads_k_stride is not None and not 1 <= heads_k <= nheads_k:
        raise ArgumentError(f"heads_k_stride: expected 1 to {nheads_k}, got {heads_k}")
    with_lse = as_flag("return_attn_probs", return_attn_probs)
    return found, Settings(groups, ORDERS.index(order), heads_k, with_lse)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor | None,
    starts_k: torch.Tensor | None,
    options: Options,
    settings: Settings,
) -> Any:
    """Runs a call whose arguments have been checked."""
    head_dim = q.shape[-1]
    heads, tokens = q.dim() - 2, q.dim() - 3  # dimensions
    by_heads = settings.groups.heads
    backward = has_backward((q, k, v), None)
    wanted = [int(backward and tensor.requires_grad) for tensor in (q, k, v)]
    q, k, v = padded(q), padded(k), padded(v)
    if by_heads.size > 1:
        agreed = [*q.shape, *k.shape, int(settings.with_lse), *wanted]
        swap = torch.ops.flash_attn_deterministic.swap
        q = swap(q, heads, tokens, by_heads.name, agreed, settings.groups.sequence.name)
        k, v = (swap(tensor, heads, tokens, by_heads.name, [], "") for tensor in (k, v))
    scale, left, right, softcap = options.scores
    out, softmax_lse = torch.ops.flash_attn_deterministic.sequence_fwd(
        q,
        k,
        v,
        starts_q,
        starts_k,
        settings.groups.sequence.name,
        by_heads.name if by_heads.size > 1 else "",
        settings.order,
        min(settings.heads_k, k.shape[heads]),
        ops.GATHER,
        backward,
        scale,
        left,
        right,
        softcap,
        options.split_size,
        options.deterministic,
        options.deterministic_bwd,
    )
    if by_heads.size > 1:
        out = swap(out, tokens, heads, by_heads.name, [], "")
    out = out[..., :head_dim]
    if not settings.with_lse:
        return out
    if by_heads.size > 1:
        # (batch, nheads, seqlen), or (nheads, total).
        by_token = softmax_lse.dim() - 1
        softmax_lse = swap(softmax_lse, by_token, by_token - 1, by_heads.name, [], "")
    return out, softmax_lse, out.new_empty(0)
