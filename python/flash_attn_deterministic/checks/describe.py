"""How error messages show the arguments of a call."""

from __future__ import annotations

import reprlib
from typing import Any

import torch


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module unless it is a built-in one."""
    return name_of(type(value))


def name_of(kind: type) -> str:
    """Returns the name of a type, as `type_name` does."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


class _Short(reprlib.Repr):
    """A repr of limited length and depth, which shows tensors and arrays by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 60

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor) and x.is_nested:
            return f"a nested tensor of dtype {x.dtype}"
        if isinstance(x, torch.Tensor):
            return f"a tensor of dtype {x.dtype} and shape {tuple(x.shape)}"
        if type(x).__module__ == "numpy" and getattr(x, "shape", None):
            return f"an array of dtype {x.dtype} and shape {x.shape}"
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            repr(x)
        except ValueError:  # thousands of digits; Python 3.14 would show the object's address
            return f"an int of {x.bit_length()} bits"
        return super().repr_int(x, level)


shown = _Short().repr
