"""Checks of numbers and flags: accepted types and ranges.

A number may be one of Python or NumPy, or a tensor or array of one element, as for torch's custom
ops. As in Python, a flag may be an integer, where all but 0 are true, and a bool counts as the
number 0 or 1. Upstream's op also takes a float or None as a flag; that is refused, as it is most
often a softmax scale in the place of `causal`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .._ops.arguments import Scores
from ..errors import ArgumentError, ArgumentTypeError
from .describe import shown, type_name

_INTS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
# The kernels take a factor as float32, where it must be a normal number: a GPU may flush a
# subnormal one to 0, and masked keys would become visible. The largest leaves room for log2(e).
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_FACTOR = "from 2**-126 to 2**127 (1.2e-38 to 1.7e38; the kernels take it as float32)"
_MAX_LENGTH = 2**30 - 1  # the sum of two lengths has to fit 32 bits
_UNLIMITED = 2**29  # a window of this width has no limit


def check_flag(name: str, value: Any) -> bool:
    """Returns an argument that is a flag.

    Raises:
        ArgumentTypeError: neither a bool nor an integer, but for instance a softmax scale.
    """
    if value is True or value is False:
        return value
    flag = _scalar(value)
    if isinstance(flag, bool):
        return flag
    if isinstance(flag, _INTS):
        return flag != 0
    raise ArgumentTypeError(f"{name}: expected a bool, got {_described(value)}")


def check_int(name: str, value: Any, expected: str = "an int") -> int:
    """Returns an argument that is an integer.

    Raises:
        ArgumentTypeError: another type.
    """
    number = _scalar(value)
    if not isinstance(number, _INTS):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {_described(value)}")
    return int(number) if isinstance(number, bool) else number  # type: ignore[return-value]


def check_float(name: str, value: Any, expected: str = "a float") -> float:
    """Returns an argument that is a number; an int is one.

    Raises:
        ArgumentTypeError: another type.
    """
    number = _scalar(value)
    if not isinstance(number, _NUMBERS):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {_described(value)}")
    return float(number) if isinstance(number, bool) else number  # type: ignore[return-value]


def _scalar(value: Any) -> Any:
    """Returns the Python number that a value stands for, or the value."""
    if isinstance(value, (*_NUMBERS, bool, torch.SymBool, str)) or value is None:
        # numpy.float64 is a float, but torch.compile does not treat it as a constant.
        is_numpy = type(value).__module__ == "numpy"
        return float(value) if is_numpy and isinstance(value, float) else value
    if isinstance(value, torch.Tensor) and value.is_nested:
        return value  # it has no shape to read below
    if hasattr(value, "item") and all(size == 1 for size in getattr(value, "shape", (0,))):
        is_meta = isinstance(value, torch.Tensor) and value.is_meta
        return value if is_meta else value.item()  # a meta tensor has no value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{shown(value)} on the meta device" if value.is_meta else shown(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{type_name(value)} {shown(value)}"
    return type_name(value)


def require(condition: Any, message: Callable[[], str]) -> None:
    """Checks a condition on numbers that may be symbolic in torch.compile and torch.export.

    These check it when the graph runs.

    Raises:
        ArgumentError: it is false; with the message.
    """
    if torch.compiler.is_compiling():
        torch._check(condition)  # type: ignore[no-untyped-call, unused-ignore]
    elif not condition:
        raise ArgumentError(message())


def check_scale(softmax_scale: Any, head_dim: int) -> float:
    """Returns the softmax scale, a positive number in the range of the kernels.

    The kernels scale scores after masking, as flash_attn's do: -inf times a scale of 0 or less
    would make a masked key visible, or NaN.

    Args:
        softmax_scale: the argument; None: head_dim ** -0.5.
        head_dim: of q, before padding; for the default scale.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN, infinite, zero, negative, or no normal number of float32.
    """
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    scale = check_float("softmax_scale", softmax_scale, "a float or None")
    # Not math.isfinite: torch.compile can't call it with a symbolic number.
    if not _SMALLEST <= scale <= _LARGEST:
        raise ArgumentError(
            f"softmax_scale: expected a positive, finite number {_FACTOR}, got {shown(scale)}; for "
            "a negative scale negate q, for scale 0 pass a q of zeros"
        )
    return float(scale)


def check_window(window_size: Any) -> tuple[int, int]:
    """Returns a window as the ops take it: -1 for no limit, at most 2^29.

    Args:
        window_size: left and right, as any sequence, array or tensor.

    Raises:
        ArgumentTypeError: not a pair of ints.
    """
    pair = hasattr(window_size, "__getitem__") and hasattr(window_size, "__len__")
    if isinstance(window_size, (str, bytes, dict)) or not pair or _length(window_size) != 2:
        raise ArgumentTypeError(
            f"window_size: expected a pair (left, right) of two ints, got {shown(window_size)}"
        )
    left, right = (
        check_int("window_size", side, "a pair (left, right) of two ints, -1 for no limit")
        for side in (window_size[0], window_size[1])
    )
    return _clamped(left), _clamped(right)


def _length(pair: Any) -> int:
    if isinstance(pair, torch.Tensor) and pair.is_nested:
        return -1
    shape = getattr(pair, "shape", None)
    return len(pair) if shape is None else (shape[0] if len(shape) == 1 else -1)


def _clamped(side: int) -> int:
    return min(side, _UNLIMITED) if side >= 0 else -1


def check_softcap(softcap: Any, softmax_scale: float) -> float:
    """Returns softcap: 0.0, for none, or a positive number in the range of the kernels.

    Args:
        softcap: the argument; negative: none, as in flash_attn.
        softmax_scale: of the same call, checked; the kernels use softmax_scale / softcap too.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN or infinite; it or softmax_scale / softcap is no normal number of
            float32.
    """
    cap = check_float("softcap", softcap)
    if cap <= 0:
        return 0.0
    if not _SMALLEST <= cap <= _LARGEST:
        raise ArgumentError(
            f"softcap: expected 0.0 or less, for no softcap, or a finite number {_FACTOR}, got "
            f"{shown(cap)}"
        )
    if not _SMALLEST <= softmax_scale / cap <= _LARGEST:
        raise ArgumentError(
            f"softcap: expected softmax_scale / softcap to be a number {_FACTOR}, got "
            f"{softmax_scale} / {cap}"
        )
    return float(cap)


def check_scores(
    head_dim: int, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any
) -> Scores:
    """Returns the checked numbers that define scores and mask; see the functions above.

    They do not depend on lengths: a window that covers a whole sequence stays a window, since
    otherwise the bits could depend on the length of another sequence in the batch.
    """
    causal = check_flag("causal", causal)
    left, right = check_window(window_size)
    scale = check_scale(softmax_scale, head_dim)
    return Scores(scale, left, 0 if causal else right, check_softcap(softcap, scale))


def check_dropout(dropout_p: Any) -> float:
    """Returns a dropout probability.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: not in [0, 1).
    """
    probability = check_float("dropout_p", dropout_p)
    if not 0 <= probability < 1:
        raise ArgumentError(
            f"dropout_p: expected a probability in [0, 1), got {shown(probability)}"
        )
    return float(probability)


def check_length(name: str, value: Any) -> int:
    """Returns a number of tokens as an int of the host; it waits for a tensor on a GPU.

    Raises:
        ArgumentTypeError: not an int.
        ArgumentError: negative, or 2^30 or more.
    """
    if type(value) is int and not torch.compiler.is_compiling() and 0 <= value <= _MAX_LENGTH:
        return value
    length = check_int(name, value)
    expected = f"{name}: expected 0 to {_MAX_LENGTH} tokens, got "
    require(length >= 0, lambda: expected + shown(length))
    require(length <= _MAX_LENGTH, lambda: expected + shown(length))
    return length


def check_num_splits(num_splits: Any) -> None:
    """Checks that num_splits is an int of 0 or more.

    Raises:
        ArgumentTypeError: not an int.
        ArgumentError: negative.
    """
    if type(num_splits) is int and num_splits >= 0:
        return
    number = check_int("num_splits", num_splits)
    if number < 0:
        raise ArgumentError(f"num_splits: expected 0 (automatic) or more, got {shown(number)}")
