"""How messages call what they were given."""

from __future__ import annotations

import reprlib
from typing import Any

import torch

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module unless it is a built-in one."""
    return name_of(type(value))


def name_of(kind: type) -> str:
    """Returns the name of a type, with its module unless it is a built-in one."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def shown(value: Any) -> str:
    """Returns a value as a message shows it: short, a tensor as dtype and shape."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"a nested tensor of dtype {value.dtype}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of dtype {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(shown(each) for each in value[:6]) + ", ..." * (len(value) > 6)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    try:
        return _SHORT.repr(value)
    except ValueError:  # an int of thousands of digits
        return f"an int of {value.bit_length()} bits"
