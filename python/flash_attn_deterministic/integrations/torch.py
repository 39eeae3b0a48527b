"""Registers this package with torch as an implementation of flash attention, when imported.

After `torch.nn.attention.activate_flash_attention_impl("flash_attn_deterministic")` the flash
backend of scaled_dot_product_attention runs these kernels on CUDA devices, forward and backward;
torch.nn.attention.varlen, nested tensors and models use it too. torch still chooses among its
backends; to be sure of this one, put calls into `sdpa_kernel`:

    import flash_attn_deterministic.integrations.torch
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

    activate_flash_attention_impl("flash_attn_deterministic")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises rather than run another backend
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

Code that asks for "FA3" or "FA4" by name, such as TorchTitan, gets these kernels after
`stand_in_for("FA3", "FA4")`.

The order of additions is that of the mode, in the backward too. `restore_flash_attention_impl()`,
in torch >= 2.11, restores torch's own kernels.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.nn.attention import list_flash_attention_impls, register_flash_attention_impl

from ..checks.tensors import check_like
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..types import Gradients, Lengths
from . import low_level

NAME = "flash_attn_deterministic"

_Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Handle:
    """Overrides torch's flash attention kernels, of one dispatch key, until it is removed."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        library: Any = torch.library.Library
        self._library: Any = library("aten", "IMPL", dispatch_key)
        with warnings.catch_warnings():
            # torch warns of each override.
            warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
            for name, function in _OVERRIDES.items():
                if hasattr(torch.ops.aten, name):  # torch 2.10 lacks the in-place form
                    self._library.impl(name, function, dispatch_key)

    def remove(self) -> None:
        """Restores torch's own kernels."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    **unknown: Any,
) -> _Forward:
    """Computes aten::_flash_attention_forward.

    Tensors are (batch, seqlen, nheads, head_dim), or with cum_seq_q (total, nheads, head_dim). The
    results: output, log-sum-exp, seed and offset of the dropout mask in uint64, and two unused
    tensors. Arguments of a newer torch are refused unless they are None.

    Source:
        aten/src/ATen/native/native_functions.yaml of torch 2.10 to 2.15; so for the others here.
    """
    lengths = _lengths(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
    numbers = dropout_p, scale, is_causal, (window_size_left, window_size_right), 0.0
    _check_unsupported(return_debug_mask, unknown)
    inputs = query, key, value
    out, softmax_lse, rng_state = low_level.forward(*inputs, numbers, lengths, alibi_slopes)
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return (
        _strided_like(out, query),
        softmax_lse,
        rng_state.view(torch.uint64),
        torch.zeros((), dtype=torch.uint64, device=query.device),
        query.new_empty(0),
    )


def forward_no_dropout_inplace(
    out: torch.Tensor, query: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Computes aten::_flash_attention_forward_no_dropout_inplace; returns the log-sum-exp."""
    check_like("out", out, "query", query)
    result, softmax_lse, *_ = forward(query, *arguments, **options)
    out.copy_(result)
    return softmax_lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unknown: Any,
) -> Gradients:
    """Computes aten::_flash_attention_backward; gradients have the strides of query, key and value.

    They are deterministic where the mode is on, or torch may use deterministic algorithms only.
    """
    _check_unsupported(False, unknown)
    lengths = _lengths(cum_seq_q, cum_seq_k, max_q, max_k, None, None)
    numbers = dropout_p, scale, is_causal, (window_size_left, window_size_right), 0.0
    result = out, logsumexp, rng_state.view(torch.int64) if dropout_p > 0 else None
    dq, dk, dv = low_level.backward(grad_out, query, key, value, result, numbers, lengths)
    return _strided_like(dq, query), _strided_like(dk, key), _strided_like(dv, value)


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Computes aten::_scaled_dot_product_flash_attention: heads before tokens.

    Warns inside torch's context_parallel, which merges the rounded results of parts of the keys.
    """
    _warn_of_context_parallel()
    seqlens = query.shape[2], key.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, *rest = forward(
        q, k, v, None, None, *seqlens, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    softmax_lse, *random = rest
    return out.transpose(1, 2), softmax_lse, None, None, *seqlens, *random


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    """Computes aten::_scaled_dot_product_flash_attention_backward; philox_seed has both numbers."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    settings = (max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    dq, dk, dv = backward(dout, q, k, v, o, logsumexp, None, None, *settings, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


_OVERRIDES = {
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_no_dropout_inplace,
    "_flash_attention_backward": backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}


def _lengths(
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> Lengths | None:
    if cum_seq_q is None:
        if cum_seq_k is not None or seqused_k is not None or block_table is not None:
            raise ArgumentError(
                "cum_seq_q: expected a tensor together with cum_seq_k, seqused_k or block_table, "
                "got None"
            )
        return None
    if cum_seq_k is None:
        if seqused_k is None or block_table is None:
            raise ArgumentError(
                "cum_seq_k: expected a tensor, or seqused_k and block_table, got None"
            )
        # The lengths are those of seqused_k, but the op requires starts too.
        cum_seq_k = low_level.starts_of(seqused_k)
    return Lengths(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, None, block_table)


def _check_unsupported(return_debug_mask: bool, unknown: dict[str, Any]) -> None:
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask: expected False; there is no debug mask")
    for name, value in unknown.items():
        if value is not None:
            raise UnsupportedError(
                f"{name}: torch {torch.__version__} passes an argument that this version of "
                "flash-attn-deterministic does not know; install a newer one"
            )


def _strided_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the strides that compiled graphs expect, those of empty_like."""
    expected = torch.empty_like(like)
    return tensor if tensor.stride() == expected.stride() else expected.copy_(tensor)


def _warn_of_context_parallel() -> None:
    """Warns where torch's context_parallel takes the results of this call for one part of many."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    if torch.ops.aten._scaled_dot_product_flash_attention.default in handlers:
        warnings.warn(
            "torch's context_parallel merges the rounded results of several ranks: bits depend on "
            "the number of ranks; flash_attn_deterministic.distributed has attention over ranks "
            "with the bits of one",
            RuntimeWarning,
            stacklevel=2,
        )


def stand_in_for(*names: str) -> None:
    """Registers these kernels under other names too, for the rest of the process.

    For code that activates a fixed one: after `stand_in_for("FA3")`, torch's
    `activate_flash_attention_impl("FA3")` activates them.

    Args:
        names: "FA3" and "FA4" are torch's; others that are registered, too.

    Raises:
        ArgumentError: another name, under which nobody asks for kernels.
    """
    known = sorted({"FA3", "FA4", *list_flash_attention_impls()} - {NAME})
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"names: expected strings, got {type(name).__name__}")
        if name not in known:
            raise ArgumentError(f"names: expected some of {', '.join(known)}, got {name!r}")
    for name in names:
        register_flash_attention_impl(name, register_fn=Handle)


register_flash_attention_impl(NAME, register_fn=Handle)
