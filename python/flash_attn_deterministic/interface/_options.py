"""What all functions do with their arguments before they call an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._checks import numbers
from .._checks.determinism import resolve_deterministic
from .._checks.split import check_split_size
from ..mode.current import resolve

# Defines the ops.
from .._ops import library as library  # isort: skip


class Options(NamedTuple):
    """The scalar arguments of an op, from softmax_scale on; those of the cache op lack the last."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    split_size: int
    deterministic: bool
    deterministic_bwd: bool


def scores(options: Options) -> tuple[float, int, int, float]:
    """What the score of a key follows from; no property, which torch 2.10 can't trace."""
    return options.softmax_scale, options.window_left, options.window_right, options.softcap


def resolve_options(
    head_dim: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    split_size: int | None,
    deterministic: bool | None = None,
) -> Options:
    """Checks the scalar arguments of a call, and fills in what the caller left open.

    The lengths play no part in it: a window that covers a whole sequence stays a window, because
    otherwise the bits could depend on the length of another sequence in the batch.

    Raises:
        ArgumentError: a wrong value.
        ArgumentTypeError: a wrong type.
        MissingInstanceError: deterministic is True, and the wheel holds no such kernels.
    """
    numbers.check_flag("causal", causal)
    numbers.check_window(window_size)
    check_split_size(split_size, head_dim)
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    numbers.check_scale(softmax_scale)
    numbers.check_softcap(softcap, softmax_scale)
    left, right = (numbers.clamped(side) for side in window_size)
    mode = resolve(split_size)
    return Options(
        float(softmax_scale),
        left,
        0 if causal else right,
        float(softcap),
        mode.split_size,
        mode.enabled,
        resolve_deterministic(deterministic, mode),
    )


def draw_rng_state(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """Draws seed and offset of a call's dropout mask from torch's generator of the device.

    They stay on the device: a replayed CUDA graph draws new ones, and nothing waits for them.

    Returns:
        (2,), int64; None without dropout.
    """
    if dropout_p == 0:
        return None
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pads head_dim to a multiple of 8 with zeros."""
    padding = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor


def slopes_for_op(alibi_slopes: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ALiBi slopes as the ops take them; nothing of the call is differentiable in them."""
    return None if alibi_slopes is None else alibi_slopes.detach().contiguous()


def returned(
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    return_attn_probs: bool,
    signed_probs: Callable[[], torch.Tensor] | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Puts together what a call returns.

    Args:
        out: without the padding of head_dim.
        softmax_lse: in float32.
        return_attn_probs: whether all of it is returned.
        signed_probs: computes S_dmask; None without dropout.
    """
    if not return_attn_probs:
        return out
    s_dmask = out.new_empty(0) if signed_probs is None else signed_probs()
    return out, softmax_lse, s_dmask


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a small tensor of lengths or indices unless it is contiguous."""
    return None if tensor is None else tensor.contiguous()
