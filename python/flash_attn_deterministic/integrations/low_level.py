"""Forward and backward without autograd, for frameworks that keep the forward's results themselves.

The order of additions is that of the mode, and that of a backward of the mode when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import get_deterministic_mode
from .._checks import kernels, numbers, tensors
from .._checks.describe import type_name
from .._checks.determinism import alert_atomics, resolve_deterministic
from .._checks.varlen import check_varlen
from .._ops.arguments import Lengths
from .._ops.arguments import Scores as OpScores
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..interface._call import contiguous, draw_rng_state, slopes_for_op

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(NamedTuple):
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

    def checked(self, head_dim: int) -> OpScores:
        """Returns the numbers, checked, as the ops take them."""
        window = [-1 if side is None else side for side in self.window_size]
        return numbers.check_scores(head_dim, self.softmax_scale, self.causal, window, self.softcap)


class Forward(NamedTuple):
    """The results of a forward call.

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
        scores: scores and mask.
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
    lengths, settings = _checked(q, k, v, scores, dropout_p, lengths, "fwd")
    mode = get_deterministic_mode()
    if mode.keep_residual:
        raise UnsupportedError(
            "keep_residual: expected False where a framework keeps the results of the forward, "
            "got True: its backward has no argument for the residual; call flash_attn_func, or "
            "make the call inside deterministic_mode(keep_residual=False)"
        )
    tree = (mode.split_size if mode.enabled else 0, mode.enabled, mode.enabled)
    rng_state = draw_rng_state(settings[0], q.device)
    random = (slopes_for_op(scores.alibi_slopes), rng_state)
    if lengths is None:
        out, softmax_lse = torch.ops.flash_attn_deterministic.fwd(
            q, k, v, *random, *settings, *tree
        )
    else:
        starts, longest, limits = lengths[:2], lengths[2:4], lengths[4:]
        indices = map(contiguous, (*starts, *limits))
        out, softmax_lse = torch.ops.flash_attn_deterministic.varlen_fwd(
            q, k, v, *indices, *random, *longest, *settings, *tree
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
        dout: the gradient of result.out, like it.
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        result: as `forward` returned it.
        scores: as in `forward`.
        dropout_p: as in `forward`.
        lengths: as in `forward`, without seqused_k, leftpad_k and block_table.
        deterministic: True: the bits of the gradients depend on their own inputs only, also where
            the mode is not enabled.

    Returns:
        dq, dk and dv: like q, k and v, contiguous.

    Raises:
        ArgumentError: a ValueError; a wrong value, shape or device.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        NotDeterministicError: a RuntimeError; torch may use deterministic algorithms only, and
            this one adds atomically.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.
    """
    lengths, settings = _checked(q, k, v, scores, dropout_p, lengths, "bwd")
    check_like("dout", dout, "q", q)
    check_like("out", result.out, "q", q)
    *tokens, nheads, _ = q.shape
    lse_shape = (*tokens[:-1], nheads, tokens[-1])
    _check_is("softmax_lse", result.softmax_lse, torch.float32, lse_shape, q.device)
    rng_state = None
    if settings[0] > 0:
        rng_state = result.rng_state
        if rng_state is None:
            raise ArgumentError(
                "rng_state: expected the tensor that the forward returned, since dropout_p is "
                f"{settings[0]}, got None"
            )
        _check_is("rng_state", rng_state, torch.int64, (2,), q.device)
    deterministic = resolve_deterministic(deterministic, get_deterministic_mode())
    if not deterministic:
        alert_atomics(q.device)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    saved = (dout, q, k, v, result.out, result.softmax_lse)
    random = (slopes_for_op(scores.alibi_slopes), rng_state)
    gradients: Gradients
    if lengths is None:
        gradients = torch.ops.flash_attn_deterministic.bwd(
            *saved, *random, *settings, deterministic
        )
    else:
        starts, longest = map(contiguous, lengths[:2]), lengths[2:4]
        gradients = torch.ops.flash_attn_deterministic.varlen_bwd(
            *saved, *starts, *random, *longest, *settings, deterministic
        )
    return gradients


def check_like(name: str, tensor: Any, like_name: str, like: torch.Tensor) -> None:
    """Checks that a tensor has the dtype, shape and device of another one.

    Raises:
        ArgumentTypeError: not a tensor.
        ArgumentError: it differs.
    """
    _check_is(name, tensor, like.dtype, like.shape, like.device, f"a tensor like {like_name}, ")


def _check_is(
    name: str,
    tensor: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    what: str = "",
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type_name(tensor)}")
    if (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, device):
        raise ArgumentError(
            f"{name}: expected {what}{dtype} {tuple(shape)} on {device}, got {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    dropout_p: float,
    lengths: Lengths | None,
    direction: str,
) -> tuple[Lengths | None, tuple[float, float, int, int, float]]:
    """Checks the arguments that `forward` and `backward` share.

    Returns:
        The lengths with Python ints; dropout_p and the numbers of scores, as the ops take them.
    """
    if lengths is None:
        tensors.check_dense(q, k, v)
        batch = q.shape[0]
    else:
        lengths = check_varlen(q, k, v, lengths)
        batch = lengths.cu_seqlens_q.shape[0] - 1
    head_dim = q.shape[-1]
    if head_dim % 8:
        raise ArgumentError(
            f"q: expected a head_dim that is a multiple of 8, got {head_dim}; pad q, k and v with "
            "zeros, or call flash_attn_func, which does"
        )
    tensors.check_alibi(scores.alibi_slopes, batch, q.shape[-2], q.device)
    kernels.check_kernels(q.device, q.dtype, head_dim, direction)
    found = scores.checked(head_dim)
    dropout_p = numbers.check_dropout(dropout_p)
    kernels.check_combination(q.device, found.softcap, dropout_p)
    return lengths, (dropout_p, *found)
