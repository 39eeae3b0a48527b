"""What all functions do with their arguments before they call an op."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._checks import numbers
from .._checks.determinism import resolve_deterministic
from .._checks.split import check_split_size
from .._mode import resolve

# Defines the ops.
from .. import _library as _library  # isort: skip


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
    numbers.check_softcap(softcap)
    check_split_size(split_size, head_dim)
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    numbers.check_scale(softmax_scale)
    left, right = window_size
    mode = resolve(split_size)
    return Options(
        float(softmax_scale),
        left if left >= 0 else -1,
        0 if causal else right if right >= 0 else -1,
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


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a small tensor of lengths, indices or slopes unless it is contiguous."""
    return None if tensor is None else tensor.contiguous()
