"""What all functions do with their arguments before they call an op."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._checks import numbers
from .._checks.split import check_split_size
from .._mode import resolve

# Defines the ops.
from .. import _library as _library  # isort: skip


class Options(NamedTuple):
    """The scalar arguments of an op."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    split_size: int
    deterministic: bool


def resolve_options(
    head_dim: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    split_size: int | None,
) -> Options:
    """Checks the scalar arguments of a call, and fills in what the caller left open.

    The lengths play no part in it: a window that covers a whole sequence stays a window, because
    otherwise the bits could depend on the length of another sequence in the batch.

    Raises:
        ArgumentError: a wrong value.
        ArgumentTypeError: a wrong type.
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
    )


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pads head_dim to a multiple of 8 with zeros."""
    padding = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a small tensor of lengths, indices or slopes unless it is contiguous."""
    return None if tensor is None else tensor.contiguous()
