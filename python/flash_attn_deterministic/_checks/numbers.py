"""Checks of the arguments that are plain numbers and flags."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError

_INTS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
_INF = float("inf")


def check_scale(softmax_scale: float) -> None:
    """Checks that the softmax scale is a positive, finite number.

    The kernels scale scores after masking, as flash_attn's do: -inf times a scale of 0 or less
    would make a masked key visible, or NaN.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN, infinite, zero or negative.
    """
    if not isinstance(softmax_scale, _NUMBERS):
        raise ArgumentTypeError(
            f"softmax_scale: expected a float or None, got {type(softmax_scale).__name__}; "
            "pass float(softmax_scale)"
        )
    # Comparisons instead of math.isfinite, which torch.compile can't put a symbolic number into.
    if not 0 < softmax_scale < _INF:
        raise ArgumentError(
            f"softmax_scale: expected a positive, finite number, got {softmax_scale}; for a "
            "negative scale negate q, for scale 0 pass a q of zeros"
        )


def check_flag(name: str, value: bool) -> None:
    """Checks that an argument is a flag, not for instance a softmax scale in its place.

    Raises:
        ArgumentTypeError: neither a bool nor an int.
    """
    if not isinstance(value, (bool, *_INTS)):
        raise ArgumentTypeError(f"{name}: expected a bool, got {type(value).__name__}")


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
                f"{type(side).__name__} in it"
            )


def check_softcap(softcap: float) -> None:
    """Checks that softcap is 0, for none, or a positive, finite number.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN, infinite or negative.
    """
    if not isinstance(softcap, _NUMBERS):
        raise ArgumentTypeError(f"softcap: expected a float, got {type(softcap).__name__}")
    if not 0 <= softcap < _INF:
        raise ArgumentError(
            f"softcap: expected a finite number, 0 or more, got {softcap}; 0.0 is no softcap"
        )


def check_dropout(dropout_p: float) -> None:
    """Checks a dropout probability.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: not in [0, 1).
    """
    if not isinstance(dropout_p, _NUMBERS):
        raise ArgumentTypeError(f"dropout_p: expected a float, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p: expected a probability in [0, 1), got {dropout_p}")


def check_length(name: str, value: Any) -> None:
    """Checks a number of tokens that the host has to know.

    Raises:
        ArgumentTypeError: not an int; a tensor would have to be waited for.
        ArgumentError: negative.
    """
    if isinstance(value, bool) or not isinstance(value, _INTS):
        raise ArgumentTypeError(
            f"{name}: expected an int, got {type(value).__name__}; a bound that is known without "
            "reading the GPU will do"
        )
    if value < 0:
        raise ArgumentError(f"{name}: expected 0 or more tokens, got {value}")


def check_num_splits(num_splits: int) -> None:
    """Checks that num_splits is an int of 0 or more.

    Raises:
        ArgumentTypeError: not an int.
        ArgumentError: negative.
    """
    if isinstance(num_splits, bool) or not isinstance(num_splits, _INTS):
        raise ArgumentTypeError(f"num_splits: expected an int, got {type(num_splits).__name__}")
    if num_splits < 0:
        raise ArgumentError(f"num_splits: expected 0 (automatic) or more, got {num_splits}")
