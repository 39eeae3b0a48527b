"""The names of the module flash_attn.flash_attn_interface 2.8.3.

Ring attention, and other code that keeps the forward's results itself, imports those with a leading
underscore. Here they are plain functions, not custom ops of a namespace flash_attn.
"""

from __future__ import annotations

from typing import Any

import torch

from ...checks.numbers import KEYS_PER_BLOCK
from ...checks.tensors import check_like
from ...errors import UnsupportedError
from ...interface import *  # noqa: F403
from ...interface import __all__ as __all__
from ...types import Gradients, Lengths
from .. import low_level

_ROWS = 128  # flash_attn rounds the rows of softmax_d up to a multiple of this


def _get_block_size_n(
    device: torch.device | str | int, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Returns the number of keys per block of the kernels, whatever the arguments."""
    return KEYS_PER_BLOCK


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention below autograd; see `flash_attn_func`. head_dim is a multiple of 8.

    Returns:
        out, softmax_lse (batch, nheads, seqlen_q) in float32, an empty tensor instead of S_dmask,
        and rng_state (2,) in int64, which the backward needs after a call with dropout.

    Raises:
        UnsupportedError: a NotImplementedError; return_softmax. Others as `flash_attn_func`.

    Source:
        _flash_attn_forward of flash_attn 2.8.3 (flash_attn_interface.py); so for the others here.
    """
    numbers = dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap
    return _forward((q, k, v), numbers, None, alibi_slopes, return_softmax)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention of packed sequences below autograd; see `flash_attn_varlen_func`.

    zero_tensors has no effect; rows of no sequence are always 0. Results as of
    `_flash_attn_forward`, with a softmax_lse of (nheads, total_q).
    """
    numbers = dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap
    lengths = Lengths(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
    )
    return _forward((q, k, v), numbers, lengths, alibi_slopes, return_softmax)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes gradients into dq, dk and dv, of any strides; None: not returned.

    out, softmax_lse and rng_state are those of the forward. deterministic=True: deterministic
    gradients, also where the mode is not enabled.

    Returns:
        softmax_d (batch, nheads, seqlen_q rounded up to a multiple of 128) in float32: the sum of
        dout * out over head_dim, 0 beyond seqlen_q.
    """
    numbers = dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap
    result, others = (out, softmax_lse, rng_state), (None, alibi_slopes, deterministic)
    _backward((dq, dk, dv), dout, (q, k, v), result, numbers, *others)
    softmax_d = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return torch.nn.functional.pad(softmax_d, (0, -softmax_d.shape[-1] % _ROWS))


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Computes gradients of packed sequences into the caller's tensors; see `_flash_attn_backward`.

    Returns:
        softmax_d (nheads, total_q + 128 * batch) in float32: the sum of dout * out over head_dim,
        those of sequence b from cu_seqlens_q[b] + 128 * b on, 0 elsewhere.
    """
    numbers = dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    result, others = (out, softmax_lse, rng_state), (lengths, alibi_slopes, deterministic)
    _backward((dq, dk, dv), dout, (q, k, v), result, numbers, *others)
    return _packed_softmax_d(dout, out, cu_seqlens_q)


# In flash_attn these call the ones above as custom ops.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _forward(
    inputs: Gradients,
    numbers: low_level.Numbers,
    lengths: Lengths | None,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if return_softmax:
        raise UnsupportedError(
            "return_softmax: expected False; flash_attn_func(..., return_attn_probs=True) returns "
            "S_dmask"
        )
    out, softmax_lse, rng_state = low_level.forward(*inputs, numbers, lengths, alibi_slopes)
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, softmax_lse, out.new_empty(0), rng_state


def _backward(
    targets: tuple[torch.Tensor | None, ...], dout: torch.Tensor, inputs: Gradients, *rest: Any
) -> None:
    """Writes the gradients of inputs into targets, once all of these are checked."""
    for name, target, like in zip("qkv", targets, inputs, strict=True):
        if target is not None:
            check_like(f"d{name}", target, name, like)
    for target, gradient in zip(targets, low_level.backward(dout, *inputs, *rest), strict=True):
        if target is not None:
            target.copy_(gradient)


def _packed_softmax_d(
    dout: torch.Tensor, out: torch.Tensor, cu_seqlens_q: torch.Tensor
) -> torch.Tensor:
    """Returns softmax_d of packed sequences in flash_attn's layout."""
    total, nheads, _ = out.shape
    batch = cu_seqlens_q.shape[0] - 1
    rows = torch.arange(total, device=out.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    sums = (dout.float() * out.float()).sum(-1)
    sums = sums.masked_fill((sequence == batch)[:, None], 0)  # rows of no sequence
    softmax_d = sums.new_zeros(total + _ROWS * batch, nheads)
    softmax_d[rows + _ROWS * sequence] = sums
    return softmax_d.t().contiguous()
