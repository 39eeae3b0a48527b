"""Values of lengths and indices, which only the CPU can read without waiting for a GPU.

A wrong one would be a slice of something else, or of nothing. On a GPU it is the caller's promise
that they are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..errors import ArgumentError


def check_starts(name: str, starts: Sequence[int], total: int | None = None) -> None:
    """Checks where packed sequences begin: from 0 on, and none before the last one's end.

    Args:
        name: of the argument.
        starts: (batch + 1,).
        total: tokens that there are; None: not known.

    Raises:
        ArgumentError: they don't.
    """
    if starts[0] != 0:
        raise ArgumentError(f"{name}: expected 0 as its first element, got {starts[0]}")
    for sequence, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end < begin:
            raise ArgumentError(
                f"{name}: expected elements that do not decrease, got {end} after {begin} (sequence"
                f" {sequence})"
            )
    if total is not None and starts[-1] > total:
        raise ArgumentError(
            f"{name}: expected at most the {total} tokens that there are as its last element, got "
            f"{starts[-1]}"
        )


def check_each(name: str, values: Sequence[int], limits: Sequence[int], what: str) -> None:
    """Checks a number of each sequence.

    Args:
        name: of the argument.
        values: (batch,), from 0 on.
        limits: (batch,), the largest that are right.
        what: the limit is, for the message.

    Raises:
        ArgumentError: one is negative or above its limit.
    """
    for sequence, (value, limit) in enumerate(zip(values, limits, strict=True)):
        if not 0 <= value <= limit:
            raise ArgumentError(
                f"{name}: expected 0 to {limit}, {what}, for sequence {sequence}, got {value}"
            )


def check_longest(name: str, longest: int | None, lengths: Sequence[int]) -> None:
    """Checks that no sequence is longer than the caller says; None: nothing is said.

    Raises:
        ArgumentError: one is.
    """
    if longest is not None and longest < max(lengths, default=0):
        raise ArgumentError(
            f"{name}: expected at least {max(lengths)}, the length of the longest sequence, got "
            f"{longest}"
        )


def check_pages(
    block_table: torch.Tensor, page_size: int, num_pages: int, ends: Sequence[int]
) -> None:
    """Checks the part of a block table that is used.

    Args:
        block_table: (batch, pages of a sequence).
        page_size: tokens per page.
        num_pages: that there are.
        ends: (batch,), tokens of each sequence.

    Raises:
        ArgumentError: too short for a sequence, or no such page.
    """
    for sequence, (row, end) in enumerate(zip(block_table.tolist(), ends, strict=True)):
        used = -(-end // page_size)
        if used > len(row):
            raise ArgumentError(
                f"block_table: expected at least {used} pages of {page_size} tokens for the {end} "
                f"of sequence {sequence}, got {len(row)}"
            )
        for page in row[:used]:
            if not 0 <= page < num_pages:
                raise ArgumentError(
                    f"block_table: expected pages 0 to {num_pages - 1}, got {page} for sequence "
                    f"{sequence}"
                )
