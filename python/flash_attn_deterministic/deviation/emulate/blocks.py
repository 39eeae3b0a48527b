"""Block sizes, from the size of on-chip memory or free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ArgumentError

SHAPES = ("paper", "swapped")


@dataclass(frozen=True)
class Blocks:
    """Rows (B_r) and keys (B_c) of a tile."""

    rows: int
    keys: int

    def __post_init__(self) -> None:
        for name, size in (("block_r", self.rows), ("block_c", self.keys)):
            if size < 1:
                raise ArgumentError(f"{name}: expected at least 1, got {size}")


def blocks_of_sram(sram: int, head_dim: int, shape: str = "paper") -> Blocks:
    """Returns the block sizes of FlashAttention's algorithm 1 for an on-chip memory.

    Args:
        sram: M, the size of on-chip memory in elements.
        head_dim: d.
        shape: paper: B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d); swapped: the two exchanged.

    Raises:
        ArgumentError: M does not hold one row each of Q, K, V and O, or shape is unknown.
    """
    if shape not in SHAPES:
        raise ArgumentError(f"shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
    if head_dim < 1:
        raise ArgumentError(f"head_dim: expected at least 1, got {head_dim}")
    if sram < 4 * head_dim:
        raise ArgumentError(
            f"sram: expected at least 4 * head_dim = {4 * head_dim} elements, one row each of "
            f"Q, K, V and O, got {sram}"
        )
    wide = math.ceil(sram / (4 * head_dim))
    narrow = min(wide, head_dim)
    return Blocks(narrow, wide) if shape == "paper" else Blocks(wide, narrow)


def check_fit(blocks: Blocks, sram: int, head_dim: int) -> None:
    """Checks that tiles of Q, O (rows) and K, V (keys) fit in on-chip memory.

    Raises:
        ArgumentError: 2 d (B_r + B_c) > M.
    """
    needed = 2 * head_dim * (blocks.rows + blocks.keys)
    if needed > sram:
        raise ArgumentError(
            f"block_r, block_c: expected 2 * head_dim * (block_r + block_c) <= sram = {sram} "
            f"elements, got {needed} with block_r {blocks.rows}, block_c {blocks.keys}"
        )
