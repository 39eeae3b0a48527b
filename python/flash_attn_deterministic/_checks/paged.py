"""Checks of paged keys and values."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from .tensors import check_int32

PAGE_MULTIPLE = 16


def check_block_table(block_table: Any, batch: int, device: torch.device) -> None:
    """Checks a block table: int32, (batch, max_num_blocks_per_seq).

    Raises:
        ArgumentTypeError: not a tensor; DtypeError: not torch.int32.
        ArgumentError: another shape or device.
    """
    layout = "(batch, max_num_blocks_per_seq)"
    check_int32("block_table", block_table, (batch, -1), layout, device)


def check_page_size(name: str, page_block_size: int) -> None:
    """Checks that a page holds a multiple of 16 tokens.

    Raises:
        ArgumentError: it does not.
    """
    if page_block_size == 0 or page_block_size % PAGE_MULTIPLE:
        raise ArgumentError(
            f"{name}: expected a page_block_size that is a multiple of {PAGE_MULTIPLE}, got "
            f"{page_block_size}"
        )


def check_no_leftpad(name: str, leftpad: torch.Tensor | None) -> None:
    """Refuses left padding together with a block table.

    Raises:
        ArgumentError: it is given.
    """
    if leftpad is not None:
        raise ArgumentError(
            f"{name}: expected None together with block_table; leave the padding out of the pages"
        )
