"""The dropout mask, as the kernels draw it, in plain torch.

A mask is a function of a seed, an offset, and of each element's sequence, head, row and key; rows
and keys are counted from the beginning of their sequence. It does not depend on batch size, number
of heads, lengths and tiles. Where each sequence has a seed of its own, it has offset 0 and counts
as the first one, wherever it stands. Random bytes come from Philox (Salmon et al., Parallel random
numbers: as easy as 1, 2, 3, 2011), with 7 rounds as in flash_attn: one call of it gives the 16
bytes that one lane of a warp needs for its elements of a tile of 16 rows and 32 keys, in
flash_attn's order.
"""

from __future__ import annotations

import math

import torch

_TILE_ROWS, _TILE_KEYS = 16, 32
_LOW = 0xFFFFFFFF
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def keep_probability(dropout_p: float) -> float:
    """Returns 1 - dropout_p as the float32 that the kernels divide by."""
    # On the CPU, also under torch.set_default_device, so that the host does not wait for a GPU.
    return float(torch.tensor(1.0 - dropout_p, dtype=torch.float32, device="cpu"))


def largest_kept_byte(dropout_p: float) -> int:
    """Returns the largest random byte for which an element is kept."""
    return math.floor(keep_probability(dropout_p) * 255.0)


def keep_mask(
    rng_state: torch.Tensor,
    dropout_p: float,
    sequences: torch.Tensor,
    heads: torch.Tensor,
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> torch.Tensor:
    """Returns which elements of the scores are kept, (batch, nheads, rows, keys).

    Args:
        rng_state: int64, whose bits count as those of unsigned numbers: (2,), seed and offset; or
            a seed of each sequence of the call, (batch of the call, 1).
        dropout_p: probability in [0, 1).
        sequences: (batch,), int64: index of each sequence in the batch.
        heads: (nheads,), int64: index of each query head.
        rows: the queries [begin, end), counted among those of the call.
        keys: the keys [begin, end).
    """
    # Whole tiles, from the one that the first element lies in.
    row, key = rows[0] // _TILE_ROWS, keys[0] // _TILE_KEYS
    tiles_r = torch.arange(row, -(-rows[1] // _TILE_ROWS), device=rng_state.device)
    tiles_c = torch.arange(key, -(-keys[1] // _TILE_KEYS), device=rng_state.device)
    random = _random_bytes(rng_state, sequences, heads, tiles_r, tiles_c)
    own_rows, own_keys = (
        slice(begin - first, end - first)
        for (begin, end), first in ((rows, row * _TILE_ROWS), (keys, key * _TILE_KEYS))
    )
    return random[:, :, own_rows, own_keys] <= largest_kept_byte(dropout_p)


def _random_bytes(
    rng_state: torch.Tensor,
    sequences: torch.Tensor,
    heads: torch.Tensor,
    tiles_r: torch.Tensor,
    tiles_c: torch.Tensor,
) -> torch.Tensor:
    """Returns (batch, nheads, 16 * tiles_r, 32 * tiles_c) random bytes, as int64."""
    lanes = torch.arange(32, device=rng_state.device)
    # (batch, nheads, 1, 1, lanes), modulo 2^64.
    if rng_state.dim() == 2:
        seed, offset = rng_state[sequences][..., None, None, None], torch.zeros_like(sequences)
    else:
        seed, offset = rng_state[0], rng_state[1] + (sequences << 21)
    offset = offset[:, None, None, None, None] + (heads << 5)[:, None, None, None] + lanes
    counter = [_low(offset), _high(offset), tiles_r[:, None, None], tiles_c[:, None]]
    words = _philox(counter, _low(seed), _high(seed))
    shifts = torch.arange(0, 32, 8, device=rng_state.device)
    # Byte n of a lane is bits c16, c8, r8, c1 of the element's place in the tile; the lane is its
    # bits r4, r2, r1 and c4, c2 (r8: bit 3 of the row, c16: bit 4 of the key, and so on).
    values = (torch.stack(words, -1)[..., None] >> shifts) & 0xFF
    shape = values.shape[:4]
    values = values.reshape(*shape, 8, 4, 2, 2, 2, 2)
    # From b, h, R, C, r421, c42, c16, c8, r8, c1 to b, h, (R, r8, r421), (C, c16, c8, c42, c1).
    values = values.permute(0, 1, 2, 8, 4, 3, 6, 7, 5, 9)
    return values.reshape(shape[0], shape[1], shape[2] * _TILE_ROWS, shape[3] * _TILE_KEYS)


def _philox(
    counter: list[torch.Tensor], key_low: torch.Tensor, key_high: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the four words of 32 bits that follow from counter and key, all of them int64."""
    x, y, z, w = counter
    for number in range(_ROUNDS):
        if number:
            key_low = _low(key_low + _KEY_STEPS[0])
            key_high = _low(key_high + _KEY_STEPS[1])
        high_x, low_x = _multiply(x, _MULTIPLIERS[0])
        high_z, low_z = _multiply(z, _MULTIPLIERS[1])
        x, y, z, w = high_z ^ y ^ key_low, low_z, high_x ^ w ^ key_high, low_x
    return [x, y, z, w]


def _multiply(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the upper and the lower half of a product of two numbers of 32 bits."""
    # In two parts: int64 does not hold the whole product.
    upper, lower = (value >> 16) * factor, (value & 0xFFFF) * factor
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def _low(value: torch.Tensor) -> torch.Tensor:
    return value & _LOW


def _high(value: torch.Tensor) -> torch.Tensor:
    return (value >> 32) & _LOW
