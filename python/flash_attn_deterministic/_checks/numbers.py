"""Checks of the arguments that are plain numbers and flags."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError
from .describe import type_name

_INTS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
# The kernels take a factor as float32, in which it must be normal: with a subnormal one, which a
# GPU may flush to 0, masked keys would become visible. The largest leaves room for log2(e).
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_FACTOR = "from 2**-126 to 2**127 (1.2e-38 to 1.7e38; the kernels take it as float32)"
# Lengths and positions are numbers of 32 bits in the kernels, with room for sums of two.
_MAX_LENGTH = 2**30 - 1
_UNLIMITED = 2**29  # a window so wide has no limit


def check_scale(softmax_scale: float) -> None:
    """Checks that the softmax scale is a positive number that the kernels can work with.

    The kernels scale scores after masking, as flash_attn's do: -inf times a scale of 0 or less
    would make a masked key visible, or NaN.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN, infinite, zero, negative, or no normal number of float32.
    """
    if not isinstance(softmax_scale, _NUMBERS):
        raise ArgumentTypeError(
            f"softmax_scale: expected a float or None, got {type_name(softmax_scale)}; "
            "pass float(softmax_scale)"
        )
    # Comparisons instead of math.isfinite, which torch.compile can't put a symbolic number into.
    if not _SMALLEST <= softmax_scale <= _LARGEST:
        raise ArgumentError(
            f"softmax_scale: expected a positive, finite number {_FACTOR}, got "
            f"{softmax_scale}; for a negative scale negate q, for scale 0 pass a q of zeros"
        )


def check_flag(name: str, value: bool) -> None:
    """Checks that an argument is a flag, not for instance a softmax scale in its place.

    Raises:
        ArgumentTypeError: neither a bool nor an int.
    """
    if not isinstance(value, (bool, *_INTS)):
        raise ArgumentTypeError(f"{name}: expected a bool, got {type_name(value)}")


def check_window(window_size: tuple[int, int]) -> None:
    """Checks that a window is two ints, left and right.

    Raises:
        ArgumentTypeError: not a pair of ints.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentTypeError(
            f"window_size: expected a tuple (left, right) of two ints, got {window_size!r}"
        )
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, _INTS):
            raise ArgumentTypeError(
                "window_size: expected a tuple (left, right) of two ints, -1 for no limit, got a "
                f"{type_name(side)} in it"
            )


def clamped(side: int) -> int:
    """Returns one side of a window as the ops take it: -1 for no limit, at most 2^29."""
    return min(side, _UNLIMITED) if side >= 0 else -1


def check_softcap(softcap: float, softmax_scale: float) -> None:
    """Checks that softcap is 0, for none, or a positive number that the kernels can work with.

    Args:
        softcap: the argument.
        softmax_scale: of the same call, and checked; the kernels use softmax_scale / softcap too.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN, infinite or negative; it or softmax_scale / softcap is no normal number
            of float32.
    """
    if not isinstance(softcap, _NUMBERS):
        raise ArgumentTypeError(f"softcap: expected a float, got {type_name(softcap)}")
    if softcap == 0:
        return
    if not _SMALLEST <= softcap <= _LARGEST:
        raise ArgumentError(
            f"softcap: expected 0.0, for no softcap, or a positive, finite number {_FACTOR}, got "
            f"{softcap}"
        )
    if not _SMALLEST <= softmax_scale / softcap <= _LARGEST:
        raise ArgumentError(
            f"softcap: expected softmax_scale / softcap to be a number {_FACTOR}, got "
            f"{softmax_scale} / {softcap}"
        )


def check_dropout(dropout_p: float) -> None:
    """Checks a dropout probability.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: not in [0, 1).
    """
    if not isinstance(dropout_p, _NUMBERS):
        raise ArgumentTypeError(f"dropout_p: expected a float, got {type_name(dropout_p)}")
    if not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p: expected a probability in [0, 1), got {dropout_p}")


def check_length(name: str, value: Any) -> None:
    """Checks a number of tokens that the host has to know.

    Raises:
        ArgumentTypeError: not an int; a tensor would have to be waited for.
        ArgumentError: negative, or 2^30 and more.
    """
    if isinstance(value, bool) or not isinstance(value, _INTS):
        raise ArgumentTypeError(
            f"{name}: expected an int, got {type_name(value)}; a bound that is known without "
            "reading the GPU will do"
        )
    if not 0 <= value <= _MAX_LENGTH:
        raise ArgumentError(f"{name}: expected 0 to {_MAX_LENGTH} tokens, got {value}")


def check_num_splits(num_splits: int) -> None:
    """Checks that num_splits is an int of 0 or more.

    Raises:
        ArgumentTypeError: not an int.
        ArgumentError: negative.
    """
    if isinstance(num_splits, bool) or not isinstance(num_splits, _INTS):
        raise ArgumentTypeError(f"num_splits: expected an int, got {type_name(num_splits)}")
    if num_splits < 0:
        raise ArgumentError(f"num_splits: expected 0 (automatic) or more, got {num_splits}")
