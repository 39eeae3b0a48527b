"""Numbers and flags: accepted types, ranges, and their form as the ops take them.

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

from ..errors import ArgumentError, ArgumentTypeError
from .describe import shown, type_name

_INTS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
# The kernels take a factor as float32, where it must be a normal number: a GPU may flush a
# subnormal one to 0, and masked keys would become visible. The largest leaves room for log2(e).
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_FACTOR = "from 2**-126 to 2**127 (1.2e-38 to 1.7e38; the kernels take it as float32)"
_MAX_LENGTH = 2**30 - 1  # the sum of two lengths has to fit 32 bits
_MAX_SPLIT_SIZE = 2**29  # beyond, counts of keys in the kernels could overflow 32 bits
_UNLIMITED = 2**29  # a window of this width has no limit
KEYS_PER_BLOCK = 64  # that every kernel takes at a time: kKeysPerBlock in cpp


def as_flag(name: str, value: Any) -> bool:
    """Returns a flag; refuses what is neither a bool nor an integer."""
    if value is True or value is False:
        return value
    flag = _scalar(value)
    if isinstance(flag, bool):
        return flag
    if isinstance(flag, _INTS):
        return flag != 0
    raise ArgumentTypeError(f"{name}: expected a bool, got {_described(value)}")


def as_int(name: str, value: Any, expected: str = "an int") -> int:
    """Returns an integer; refuses other types."""
    number = _scalar(value)
    if not isinstance(number, _INTS):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {_described(value)}")
    return int(number) if isinstance(number, bool) else number  # type: ignore[return-value]


def as_float(name: str, value: Any, expected: str = "a float") -> float:
    """Returns a number, an int too; refuses other types."""
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
    """Raises ArgumentError unless a condition on numbers holds.

    In torch.compile and torch.export a symbolic one is checked when the graph runs.
    """
    if torch.compiler.is_compiling() or isinstance(condition, torch.SymBool):
        torch._check(condition)  # type: ignore[no-untyped-call, unused-ignore]
    elif not condition:
        raise ArgumentError(message())


def as_scores(
    head_dim: int, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any
) -> tuple[float, int, int, float]:
    """Returns softmax_scale (None: head_dim ** -0.5), window_left, window_right and softcap.

    They do not depend on lengths: a window that covers a whole sequence stays a window, since
    otherwise the bits could depend on the length of another sequence in the batch.
    """
    causal = as_flag("causal", causal)
    left, right = as_window(window_size)
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    scale = as_float("softmax_scale", softmax_scale, "a float or None")
    cap = as_float("softcap", softcap)
    if cap <= 0:  # none, as in flash_attn
        cap = 0.0
    check_factors(scale, cap)
    return float(scale), left, 0 if causal else right, float(cap)


def check_factors(softmax_scale: float, softcap: float) -> None:
    """Checks that the kernels can take two numbers as float32.

    The kernels scale scores after masking, as flash_attn's do: -inf times a scale of 0 or less
    would make a masked key visible, or NaN. They use softmax_scale / softcap too.
    """
    # Not math.isfinite: torch.compile can't call it with a symbolic number.
    if not _SMALLEST <= softmax_scale <= _LARGEST:
        raise ArgumentError(
            f"softmax_scale: expected a positive, finite number {_FACTOR}, got "
            f"{shown(softmax_scale)}; for a negative scale negate q, for scale 0 pass a q of zeros"
        )
    if softcap == 0:
        return
    if not _SMALLEST <= softcap <= _LARGEST:
        raise ArgumentError(
            f"softcap: expected 0.0 or less, for no softcap, or a finite number {_FACTOR}, got "
            f"{shown(softcap)}"
        )
    if not _SMALLEST <= softmax_scale / softcap <= _LARGEST:
        raise ArgumentError(
            f"softcap: expected softmax_scale / softcap to be a number {_FACTOR}, got "
            f"{softmax_scale} / {softcap}"
        )


def as_window(window_size: Any) -> tuple[int, int]:
    """Returns a pair, of any sequence, array or tensor, as the ops take it: -1 for no limit."""
    pair = hasattr(window_size, "__getitem__") and hasattr(window_size, "__len__")
    if isinstance(window_size, (str, bytes, dict)) or not pair or _length(window_size) != 2:
        raise _no_window(window_size)
    left, right = (_scalar(window_size[side]) for side in (0, 1))
    if not (isinstance(left, _INTS) and isinstance(right, _INTS)):
        raise _no_window(window_size)
    return _clamped(as_int("window_size", left)), _clamped(as_int("window_size", right))


def _no_window(window_size: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        "window_size: expected a pair (left, right) of two ints, -1 or any negative number for no "
        f"limit, got {shown(window_size)}"
    )


def _length(pair: Any) -> int:
    if isinstance(pair, torch.Tensor) and pair.is_nested:
        return -1
    shape = getattr(pair, "shape", None)
    return len(pair) if shape is None else (shape[0] if len(shape) == 1 else -1)


def _clamped(side: int) -> int:
    return min(side, _UNLIMITED) if side >= 0 else -1


def as_dropout(dropout_p: Any) -> float:
    """Returns a dropout probability in [0, 1)."""
    probability = as_float("dropout_p", dropout_p)
    if not 0 <= probability < 1:
        raise ArgumentError(
            f"dropout_p: expected a probability in [0, 1), got {shown(probability)}"
        )
    return float(probability)


def check_length(name: str, tokens: int) -> None:
    """Checks that a number of tokens is 0 to 2^30 - 1."""

    def message() -> str:
        return f"{name}: expected 0 to {_MAX_LENGTH} tokens, got {shown(tokens)}"

    require(tokens >= 0, message)
    require(tokens <= _MAX_LENGTH, message)


def check_num_splits(num_splits: Any) -> None:
    """Checks that num_splits is an int of 0 or more."""
    if type(num_splits) is int and num_splits >= 0:
        return
    number = as_int("num_splits", num_splits)
    if number < 0:
        raise ArgumentError(f"num_splits: expected 0 (automatic) or more, got {shown(number)}")


def as_split_size(split_size: Any, name: str = "split_size") -> int:
    """Returns a split size; whether it fits the kernel's blocks is not checked."""
    tokens = as_int(name, split_size, "an int or None")
    if not 0 <= tokens <= _MAX_SPLIT_SIZE:
        raise ArgumentError(
            f"{name}: expected a number of tokens up to 2**29, or 0 for one split, got "
            f"{shown(tokens)}"
        )
    return tokens


def as_mode_split_size(split_size: Any, name: str = "split_size") -> int:
    """Returns a split size that fits the kernels' blocks."""
    tokens = as_split_size(split_size, name)
    check_multiple(tokens, KEYS_PER_BLOCK, name)
    return tokens


def check_multiple(split_size: int, block_n: int, name: str = "split_size") -> None:
    """Checks that splits end where the blocks of a kernel do."""
    if split_size < 0 or split_size % block_n:
        below = max(split_size // block_n * block_n, 0)
        valid = f"{below} and {below + block_n}" if below else str(block_n)
        raise ArgumentError(
            f"{name}: expected a multiple of {block_n}, the keys that a kernel takes at a time, "
            f"got {split_size}; the nearest valid: {valid} (0: one split)"
        )
