"""Forward and backward without autograd, for frameworks that keep the forward's results themselves.

The order of additions is that of the mode, and that of a backward of the mode when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..checks.ops import validate
from ..errors import ArgumentError, UnsupportedError
from ..interface.call import completed, resolve_options, with_ints
from ..ops.autograd import alert_atomics, run
from ..schemas import argument_names, backward_call, forward_call
from ..types import Call, Gradients, Lengths, Options

# Defines the ops.
from ..ops import library as library  # isort: skip


class Mask(NamedTuple):
    """The arguments that define scores and mask.

    Args:
        softmax_scale: positive factor of q k^T; None: head_dim ** -0.5.
        causal: whether the mask is causal, aligned to the bottom right corner.
        window_size: (left, right), how many keys a query sees on either side; None or a negative
            number: no limit.
        softcap: 0.0 for none.
        alibi_slopes: (nheads,) or (batch, nheads), float32, or None.
    """

    softmax_scale: float | None
    causal: bool = False
    window_size: Sequence[int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


class Forward(NamedTuple):
    """The results of a forward call.

    Args:
        out: like q, with the head_dim of v, contiguous.
        softmax_lse: (batch, nheads, seqlen_q), float32; of packed calls (nheads, total_q).
        rng_state: (2,), int64, seed and offset of the dropout mask; None without dropout.
    """

    out: torch.Tensor
    softmax_lse: torch.Tensor
    rng_state: torch.Tensor | None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    dropout_p: float = 0.0,
    lengths: Lengths | None = None,
) -> Forward:
    """Runs a forward op; arguments as of `flash_attn_func` or, with lengths, the packed one.

    A head_dim is a multiple of 8. A mode with keep_residual raises UnsupportedError.
    """
    lengths, options = _resolved(q, mask, dropout_p, lengths, False)
    if options.keep_residual:
        raise UnsupportedError(
            "keep_residual: expected False where a framework keeps the results of the forward, "
            "got True: its backward has no argument for the residual; call flash_attn_func, or "
            "make the call inside deterministic_mode(keep_residual=False)"
        )
    call = forward_call((q, k, v), lengths, options, mask.alibi_slopes)
    _check_head_dim(call)
    if options.dropout_p > 0:
        call = completed(call, pads=False)
    op, arguments = call
    out, softmax_lse = run(call)
    return Forward(out, softmax_lse, arguments[argument_names(op).index("rng_state")])


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: Forward,
    mask: Mask,
    dropout_p: float = 0.0,
    lengths: Lengths | None = None,
    deterministic: bool = False,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """Runs a backward op; arguments as of `forward`, without seqused_k, leftpad_k and block_table.

    dout and dlse (None: 0) are the gradients of result, which `forward` returned. With
    `deterministic`, the bits of the gradients depend on their own inputs only, also where the mode
    is not enabled. Returns dq, dk and dv: like q, k and v, contiguous.
    """
    lengths, options = _resolved(q, mask, dropout_p, lengths, deterministic)
    if isinstance(dout, torch.Tensor) and dout.dim() and dout.stride(-1) != 1:
        dout = dout.contiguous()
    rng_state = result.rng_state if options.dropout_p > 0 else None
    results = result.out, result.softmax_lse
    random = mask.alibi_slopes, rng_state
    call = backward_call(dout, (q, k, v), *results, lengths, options, *random, dlse=dlse)
    _check_head_dim(call)
    if not options.deterministic_bwd:
        alert_atomics(q.device)
    gradients: Gradients = run(call)
    return gradients


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """Returns (n + 1,), int32: the sum of all lengths before each, and their total."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _resolved(
    q: torch.Tensor, mask: Mask, dropout_p: float, lengths: Lengths | None, deterministic: bool
) -> tuple[Lengths | None, Options]:
    """Returns the lengths with Python ints, and the numbers of a call."""
    scale, causal, window, softcap, _ = mask
    sides = tuple(-1 if side is None else side for side in window)
    scores = scale, causal, sides, softcap
    _, options = resolve_options(q, dropout_p, *scores, None, deterministic)
    return None if lengths is None else with_ints(lengths, same=False), options


def _check_head_dim(call: Call) -> None:
    """Refuses a head_dim that is no multiple of 8: results would have the padded one."""
    op, arguments = call
    given = dict(zip(argument_names(op), arguments, strict=False))
    for name in "qv":
        head_dim = getattr(given[name], "shape", (0,))[-1]
        if head_dim % 8:
            validate(op, arguments)
            raise ArgumentError(
                f"{name}: expected a head_dim that is a multiple of 8, got {head_dim}; pad q, k "
                "and v with zeros, or call flash_attn_func, which does"
            )
