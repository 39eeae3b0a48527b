"""Draws cases from tests whose parameters multiply to more than can be run."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest


def count(function: Any) -> int:
    """Returns how many cases the marks of a test function make."""
    return math.prod(len(mark.args[1]) for mark in _marks(function))


def draw(function: Any, number: int, seed: int) -> None:
    """Puts one list of drawn cases in the place of a test function's parametrize marks.

    Args:
        function: the test function; its body is not touched.
        number: how many cases to draw, at most; all of them where there are fewer.
        seed: of the choice; with the same seed and number a function gets the same cases.
    """
    marks = _marks(function)
    if not marks:
        return
    generator = random.Random(f"{seed} {function.__name__}")
    axes = [list(mark.args[1]) for mark in marks]
    total = count(function)
    places = range(total) if total <= number else generator.sample(range(total), number)
    names = list(itertools.chain.from_iterable(_names(mark.args[0]) for mark in marks))
    cases = [_case(place, marks, axes) for place in places]
    ids = ["-".join(f"{n}={_text(v)}" for n, v in zip(names, case, strict=True)) for case in cases]
    others = [mark for mark in function.pytestmark if mark.name != "parametrize"]
    function.pytestmark = [*others, pytest.mark.parametrize(names, cases, ids=ids).mark]


def _marks(function: Any) -> list[Any]:
    return [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]


def _names(names: str | list[str] | tuple[str, ...]) -> list[str]:
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return list(names)


def _case(place: int, marks: list[Any], axes: list[list[Any]]) -> tuple[Any, ...]:
    """Returns the values of case number `place`, counted as the digits of a number are."""
    values: list[Any] = []
    for mark, axis in zip(marks, axes, strict=True):
        place, digit = divmod(place, len(axis))
        value = axis[digit]
        values.extend(value if len(_names(mark.args[0])) > 1 else [value])
    return tuple(values)


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")
