"""The tree of additions of dk and dv, for the CPU and for ranks; the kernels': tree/key_tree.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# Rows of a leaf, counted from the beginning of their sequence: chunk_rows of cpp/instances.json.
CHUNK_ROWS = 4096

_Sum = TypeVar("_Sum")


def add_up(
    sums: dict[tuple[int, int], _Sum], chunks: int, add: Callable[[_Sum, _Sum], _Sum]
) -> _Sum | None:
    """Adds sums of chunks in pairs 2 i and 2 i + 1, then those sums in pairs, and so on.

    Args:
        sums: by (n, i): of the i-th run of 2^n chunks. A chunk is in one of them, or no row of it
            counts.
        chunks: of the sequence.
        add: adds two sums.

    Returns:
        The sum of all; None if there are none.
    """

    return _total(sums, add, max(chunks - 1, 0).bit_length(), 0)


# Not within `add_up`: a function that refers to itself there would keep the sums, and the GPU
# memory that they lie in, until the garbage collector runs.
def _total(
    sums: dict[tuple[int, int], _Sum], add: Callable[[_Sum, _Sum], _Sum], level: int, index: int
) -> _Sum | None:
    found = sums.get((level, index))
    if found is not None or level == 0:
        return found
    left, right = (_total(sums, add, level - 1, 2 * index + side) for side in (0, 1))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)
