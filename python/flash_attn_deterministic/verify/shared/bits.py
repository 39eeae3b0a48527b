"""Comparison of tensors bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views floating-point numbers as integers: -0 differs from 0, a NaN equals itself."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


@dataclass(frozen=True)
class Number:
    """One element of a tensor: its bits in hex, and its value in words (JSON has no NaN)."""

    bits: str
    value: str


@dataclass(frozen=True)
class Difference:
    """Where two tensors first differ."""

    elements: int  # how many were compared; 0 where shapes or dtypes differ
    differing: int  # how many of them differ
    index: tuple[int, ...] | None  # the first differing one; None where shapes or dtypes differ
    left: Number | None  # the element there of one side, None without index
    right: Number | None  # that of the other
    words: str  # all of it in a sentence


def difference(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """Returns where two tensors differ, None if they are equal bit for bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        words = f"{_kind(left)} against {_kind(right)}"
        return Difference(0, 0, None, None, None, words)
    left_bits, right_bits = bits(left.detach()), bits(right.detach())
    if torch.equal(left_bits, right_bits):
        return None
    differs = left_bits != right_bits
    index = tuple(int(i) for i in differs.nonzero()[0])
    numbers = [_number(one[index]) for one in (left.detach(), right.detach())]
    count = int(differs.sum())
    words = (
        f"{count} of {differs.numel()} elements differ, the first at {list(index)}: "
        f"{numbers[0].bits} ({numbers[0].value}) and {numbers[1].bits} ({numbers[1].value})"
    )
    return Difference(differs.numel(), count, index, numbers[0], numbers[1], words)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _number(element: torch.Tensor) -> Number:
    width = element.element_size()
    unsigned = int(bits(element)) & (256**width - 1)
    return Number(f"0x{unsigned:0{2 * width}x}", repr(element.item()))
