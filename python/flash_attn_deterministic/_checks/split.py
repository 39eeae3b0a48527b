"""Checks of split sizes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ArgumentError, BuildInfoError
from ..info.build_info import build_info
from .describe import shown
from .numbers import check_int

_MAX_SPLIT_SIZE = 2**29  # beyond, counts of keys in the kernels could overflow 32 bits


def _common_block_n() -> int:
    """Returns the least common multiple of the keys per block of all head dims."""
    try:
        tiles = build_info().tiles
    except BuildInfoError:
        return 64  # a source tree: the value of all kernels
    return math.lcm(*(tile.block_n for tile in tiles.values()))


# Read at import: torch.compile can't trace reading a file.
_COMMON_BLOCK_N = _common_block_n()


def check_split_size(split_size: Any, head_dim: int) -> int | None:
    """Returns the split size of one call.

    The block size is not checked while torch.compile traces, which can't read the wheel's record:
    the op checks it.

    Args:
        split_size: the argument; None: the mode's, already checked.
        head_dim: 1 to 256.

    Raises:
        ArgumentTypeError: not an int.
        ArgumentError: negative, above 2^29, or no multiple of the keys per block of this head
            dim's kernel.
    """
    if split_size is None:
        return None
    tokens = _check_number(split_size, "split_size")
    if not torch.compiler.is_compiling():
        check_multiple(tokens, build_info().tile(head_dim).block_n)
    return tokens


def check_mode_split_size(split_size: Any, name: str = "split_size") -> int:
    """Returns a split size that is valid for every head dim; see `check_split_size`."""
    tokens = _check_number(split_size, name)
    check_multiple(tokens, _COMMON_BLOCK_N, name)
    return tokens


def _check_number(split_size: Any, name: str) -> int:
    tokens = check_int(name, split_size, "an int or None")
    if not 0 <= tokens <= _MAX_SPLIT_SIZE:
        raise ArgumentError(
            f"{name}: expected a number of tokens up to 2**29, or 0 for one split, got "
            f"{shown(tokens)}"
        )
    return tokens


def check_multiple(split_size: int, block_n: int, name: str = "split_size") -> None:
    """Checks that splits end where the blocks of a kernel do.

    Raises:
        ArgumentError: negative, or no multiple of block_n.
    """
    if split_size < 0 or split_size % block_n:
        below = max(split_size // block_n * block_n, 0)
        valid = f"{below} and {below + block_n}" if below else str(block_n)
        raise ArgumentError(
            f"{name}: expected a multiple of {block_n}, the keys that a kernel takes at a time, "
            f"got {split_size}; the nearest valid: {valid} (0: one split)"
        )
