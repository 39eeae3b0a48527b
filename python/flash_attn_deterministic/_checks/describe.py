"""How messages call what they were given."""

from __future__ import annotations


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module unless it is a built-in one."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
