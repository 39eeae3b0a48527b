"""The ops below autograd, for frameworks that keep the results of a forward call themselves.

The mode of this package decides on the order of additions, as everywhere; a backward takes the mode
that holds when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import get_deterministic_mode
from .._checks import kernels, numbers, tensors
from .._checks.determinism import alert_atomics
from .._ops.arguments import Lengths
from ..errors import ArgumentError, UnsupportedError
from ..interface._call import contiguous, draw_rng_state, slopes_for_op

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(NamedTuple):
    """What the score of a visible key is.

    Args:
        softmax_scale: positive factor of q k^T.
        causal: whether the mask is causal, aligned to the bottom right corner.
        window_size: (left, right), how many keys a query sees on either side; None or a negative
            number: no limit.
        softcap: 0.0 for none.
        alibi_slopes: (nheads,) or (batch, nheads), float32, or None.
    """

    softmax_scale: float
    causal: bool = False
    window_size: Sequence[int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None

    def numbers(self) -> tuple[float, int, int, float]:
        """Returns softmax_scale, window_left, window_right and softcap, checked, as the ops do."""
        window = [-1 if side is None else side for side in self.window_size]
        return numbers.check_scores(0, self.softmax_scale, self.causal, window, self.softcap)


class Forward(NamedTuple):
    """What a forward call returns.

    Args:
        out: like q, contiguous.
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
    scores: Scores,
    dropout_p: float = 0.0,
    lengths: Lengths | None = None,
) -> Forward:
    """Runs a forward op.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16; packed (total_q, nheads,
            head_dim). head_dim is a multiple of 8.
        k: (batch, seqlen_k, nheads_k, head_dim); packed (total_k, nheads_k, head_dim), with a
            block_table (pages, page_block_size, nheads_k, head_dim).
        v: like k.
        scores: what the score of a key is.
        dropout_p: probability in [0, 1).
        lengths: where packed sequences begin and end; None: a dense call.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; softcap and dropout on a CUDA device, or a mode
            with keep_residual.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.
    """
    _check(q, k, v, lengths, "fwd")
    numbers.check_dropout(dropout_p)
    kernels.check_combination(q.device, scores.softcap, dropout_p)
    mode = get_deterministic_mode()
    if mode.keep_residual:
        raise UnsupportedError(
            "keep_residual: expected False where a framework keeps the results of the forward, "
            "got True: its backward has no argument for the residual; call flash_attn_func, or "
            "make the call inside deterministic_mode(keep_residual=False)"
        )
    tree = (mode.split_size if mode.enabled else 0, mode.enabled, mode.enabled)
    rng_state = draw_rng_state(dropout_p, q.device)
    random = (slopes_for_op(scores.alibi_slopes), rng_state)
    settings = (float(dropout_p), *scores.numbers(), *tree)
    if lengths is None:
        out, softmax_lse = torch.ops.flash_attn_deterministic.fwd(q, k, v, *random, *settings)
    else:
        starts, longest, limits = lengths[:2], lengths[2:4], lengths[4:]
        out, softmax_lse = torch.ops.flash_attn_deterministic.varlen_fwd(
            q, k, v, *map(contiguous, (*starts, *limits)), *random, *longest, *settings
        )
    return Forward(out, softmax_lse, rng_state)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: Forward,
    scores: Scores,
    dropout_p: float = 0.0,
    lengths: Lengths | None = None,
    deterministic: bool = False,
) -> Gradients:
    """Runs a backward op.

    Args:
        dout: like result.out; the gradient that comes in.
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        result: what `forward` returned.
        scores: as in `forward`.
        dropout_p: as in `forward`.
        lengths: as in `forward`, without seqused_k, leftpad_k and block_table.
        deterministic: whether the bits of the gradients depend on their own inputs only, even
            where the mode is not enabled; where it is, they always do.

    Returns:
        dq, dk and dv: like q, k and v, contiguous.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        NotDeterministicError: a RuntimeError; torch is to use deterministic algorithms only, and
            this one adds atomically.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.
    """
    _check(q, k, v, lengths, "bwd")
    deterministic = deterministic or get_deterministic_mode().enabled
    if not deterministic:
        alert_atomics(q.device)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    saved = (dout, q, k, v, result.out, result.softmax_lse)
    random = (slopes_for_op(scores.alibi_slopes), result.rng_state)
    settings = (float(dropout_p), *scores.numbers(), deterministic)
    gradients: Gradients
    if lengths is None:
        gradients = torch.ops.flash_attn_deterministic.bwd(*saved, *random, *settings)
    else:
        starts, longest = map(contiguous, lengths[:2]), lengths[2:4]
        gradients = torch.ops.flash_attn_deterministic.varlen_bwd(
            *saved, *starts, *random, *longest, *settings
        )
    return gradients


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths | None, direction: str
) -> None:
    if lengths is None:
        tensors.check_dense(q, k, v)
    else:
        tensors.check_alike(q, (("k", k), ("v", v)))
    head_dim = q.shape[-1]
    if head_dim % 8:
        raise ArgumentError(
            f"q: expected a head_dim that is a multiple of 8, got {head_dim}; pad q, k and v with "
            "zeros, or call flash_attn_func, which does"
        )
    kernels.check_kernels(q.device, q.dtype, head_dim, direction)
