"""Where the tokens of a cache lie, and how they are rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slots:
    """The places of a sequence's tokens in buffers of shape (rows, tokens, nheads_k, head_dim).

    A sequence has one row of them, or with a block table (batch, pages) several, in order.
    """

    tokens: int
    rows: Sequence[int] = ()
    block_table: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.tokens * (1 if self.block_table is None else self.block_table.shape[1])

    def __call__(self, sequence: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns row and place of the tokens [begin, end), as indices into the buffer."""
        token = torch.arange(begin, end, device="cpu")
        if self.block_table is None:
            return torch.full_like(token, self.rows[sequence]), token
        page = torch.div(token, self.tokens, rounding_mode="floor")
        return self.block_table[sequence].long().cpu()[page], token % self.tokens


def rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: int,
    interleaved: bool,
    advance: bool,
) -> torch.Tensor:
    """Rotates pairs of the first elements of each row, in float32, rounded to x's dtype.

    Args:
        x: (seqlen, nheads, head_dim).
        cos: (seqlen_ro, rotary_dim / 2).
        sin: like cos.
        position: of the first row, as an index into cos.
        interleaved: whether pairs are (0, 1), (2, 3) and so on, or (0, rotary_dim / 2) and so on.
        advance: whether the next rows are at position + 1 and so on, or at the same.
    """
    positions = torch.full((x.shape[0],), position, device=cos.device)
    if advance:
        positions += torch.arange(x.shape[0], device=cos.device)
    half = cos.shape[1]
    left = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    right = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos[positions, None].to(dtype), sin[positions, None].to(dtype)
    real, imaginary = x[..., left].to(dtype), x[..., right].to(dtype)
    rotated = x.clone()
    rotated[..., left] = (real * cos - imaginary * sin).to(x.dtype)
    rotated[..., right] = (real * sin + imaginary * cos).to(x.dtype)
    return rotated
