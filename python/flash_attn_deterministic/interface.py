"""The functions of flash_attn's Python interface."""

from __future__ import annotations

from typing import Literal, overload

import torch

from . import _checks

# Defines the ops.
from . import _library as _library


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes softmax(q k^T * softmax_scale) v with the call signature of flash_attn 2.8.3.

    With causal=True the mask is aligned to the bottom right corner: key j is visible to query i
    where j <= i + seqlen_k - seqlen_q. Visible keys are 1:

        seqlen_q = 2, seqlen_k = 5        seqlen_q = 5, seqlen_k = 2
            1 1 1 1 0                         0 0
            1 1 1 1 1                         0 0
                                              0 0
                                              1 0
                                              1 1

    CPU tensors run through `flash_attn_deterministic.reference`: exact in its order of operations,
    and slow; meant for tests, not for long sequences. The backward is not there yet: tensors that
    require a gradient are accepted, and backward() raises NotImplementedError.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU or a CUDA device.
            head_dim is 1 to 256; if no multiple of 8, q, k and v are padded with zeros (copied).
            They are copied also where the last dimension is strided, or where rows do not start
            at multiples of 8 elements: kernels load 16 bytes at a time.
        k: (batch, seqlen_k, nheads_k, head_dim), like q. nheads is a multiple of nheads_k: query
            head h uses key and value head h // (nheads / nheads_k).
        v: (batch, seqlen_k, nheads_k, head_dim), like q.
        dropout_p: only 0.0 so far.
        softmax_scale: positive, finite factor of q k^T; None: head_dim ** -0.5.
        causal: whether to apply the mask above.
        window_size: only (-1, -1), no window, so far.
        softcap: only 0.0 so far.
        alibi_slopes: only None so far.
        deterministic: about the backward pass, in flash_attn as here; None follows the mode of
            this package, where flash_attn's default is False. The forward pass ignores it: it
            gives the same bits every time.
        return_attn_probs: whether to return softmax_lse and, in the place of flash_attn's dropout
            mask, an empty tensor (as flash_attn does without dropout).

    Returns:
        out (batch, seqlen_q, nheads, head_dim) in q's dtype; with return_attn_probs the tuple of
        out, softmax_lse (batch, nheads, seqlen_q) in float32, the natural logarithm of the sum of
        exp(scaled scores), and an empty tensor of shape (0,) in q's dtype. Rows without a visible
        key: out 0, softmax_lse +inf.

    Raises:
        UnsupportedError: a NotImplementedError; an argument asks for what is not there yet.
        ArgumentError: a ValueError; shapes, devices or softmax_scale are wrong.
        ArgumentTypeError: a TypeError; DtypeError for the dtype of a tensor.
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Example:
        >>> q = k = v = torch.ones(1, 4, 2, 64, dtype=torch.bfloat16)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 4, 2, 64])
    """
    _checks.check_supported(dropout_p, window_size, softcap, alibi_slopes)
    _checks.check_tensors(q, k, v)
    _checks.check_causal(causal)
    head_dim = q.shape[3]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    _checks.check_scale(softmax_scale)
    _checks.check_kernels(q.device, q.dtype, head_dim)
    out, softmax_lse = torch.ops.flash_attn_deterministic.fwd(
        _padded(q), _padded(k), _padded(v), float(softmax_scale), bool(causal)
    )
    out = out[..., :head_dim]
    return (out, softmax_lse, q.new_empty(0)) if return_attn_probs else out


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pads head_dim to a multiple of 8 with zeros."""
    padding = -tensor.shape[3] % 8
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor
