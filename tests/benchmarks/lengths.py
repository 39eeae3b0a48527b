"""Lengths of packed sequences."""

from __future__ import annotations

import random


def ragged(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Draws the lengths of packed sequences, the same ones each time."""
    numbers = random.Random(0)
    return tuple(numbers.randint(shortest, longest) for _ in range(batch))
