"""Where the tokens of a cache lie, and how they are rotated."""

from __future__ import annotations

import torch


def places(
    home: int | torch.Tensor, begin: int, end: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns row and place of a sequence's tokens [begin, end), as indices into a buffer.

    `home` is its row in a buffer (rows, tokens, nheads_k, head_dim), or its pages, in order.
    """
    token = torch.arange(begin, end, device="cpu")
    if isinstance(home, int):
        return torch.full_like(token, home), token
    return home.long().cpu()[token // page_size], token % page_size


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
