"""Checks of split sizes."""

from __future__ import annotations

import math

import torch

from .._build_info import build_info
from ..errors import ArgumentError, ArgumentTypeError


def check_split_size(split_size: int | None, head_dim: int) -> None:
    """Checks the split size of one call.

    Under torch.compile the block size is left to the op itself, which repeats the check when it
    runs: what the wheel holds can't be traced.

    Args:
        split_size: None: the mode's, which has been checked.
        head_dim: 1 to 256.

    Raises:
        ArgumentTypeError: not an int.
        ArgumentError: negative, or no multiple of the keys per block of this head dim's kernel.
    """
    if split_size is None:
        return
    _check_number(split_size, "split_size")
    if not torch.compiler.is_compiling():
        _check_multiple(split_size, build_info().tile(head_dim).block_n, "split_size")


def check_mode_split_size(split_size: int, name: str = "split_size") -> None:
    """Checks a split size that has to serve every head dim; see `check_split_size`."""
    _check_number(split_size, name)
    if split_size != 0 and not torch.compiler.is_compiling():
        block_n = math.lcm(*(tile.block_n for tile in build_info().tiles.values()))
        _check_multiple(split_size, block_n, name)


def _check_number(split_size: int, name: str) -> None:
    if isinstance(split_size, bool) or not isinstance(split_size, (int, torch.SymInt)):
        raise ArgumentTypeError(f"{name}: expected an int or None, got {type(split_size).__name__}")
    if split_size < 0:
        raise ArgumentError(
            f"{name}: expected a number of tokens, or 0 for one split, got {split_size}"
        )


def _check_multiple(split_size: int, block_n: int, name: str) -> None:
    if split_size % block_n:
        below = split_size // block_n * block_n
        valid = f"{below} and {below + block_n}" if below else str(block_n)
        raise ArgumentError(
            f"{name}: expected a multiple of {block_n}, the keys that a kernel takes at a time, "
            f"got {split_size}; the nearest valid: {valid} (0: one split)"
        )
