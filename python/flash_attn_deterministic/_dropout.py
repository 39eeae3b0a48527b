"""The dropout mask, as the kernels draw it, in plain torch.

A mask is a function of a seed, an offset, and of each element's sequence, head, row and key; rows
and keys are counted from the beginning of their sequence. Batch size, number of heads, lengths and
tiles play no part. Random bytes come from Philox (Salmon et al., Parallel random numbers: as easy
as 1, 2, 3, 2011), with 7 rounds as in flash_attn: one call of it gives the 16 bytes that one lane
of a warp needs for its elements of a tile of 16 rows and 32 keys, in flash_attn's order.
"""

from __future__ import annotations

import math

import torch

_TILE_ROWS, _TILE_KEYS = 16, 32
_LOW = 0xFFFFFFFF
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Scores = tuple[float, int, int, float]


def keep_probability(dropout_p: float) -> float:
    """Returns 1 - dropout_p as the float32 that the kernels divide by."""
    # On the CPU whatever torch.set_default_device says: nothing is to be waited for.
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
    """Returns which elements of the scores are kept.

    Args:
        rng_state: (2,), int64: seed and offset, whose bits count as those of unsigned numbers.
        dropout_p: probability in [0, 1).
        sequences: (batch,), int64: index of each sequence in the batch.
        heads: (nheads,), int64: index of each query head.
        rows: the queries [begin, end), counted among those of the call.
        keys: the keys [begin, end).

    Returns:
        (batch, nheads, rows, keys), bool.
    """
    # Whole tiles, from the one that the first element lies in.
    row, key = rows[0] // _TILE_ROWS, keys[0] // _TILE_KEYS
    tiles_r = torch.arange(row, -(-rows[1] // _TILE_ROWS), device=rng_state.device)
    tiles_c = torch.arange(key, -(-keys[1] // _TILE_KEYS), device=rng_state.device)
    random = _random_bytes(rng_state, sequences, heads, tiles_r, tiles_c)
    first_row, first_key = rows[0] - row * _TILE_ROWS, keys[0] - key * _TILE_KEYS
    random = random[
        :,
        :,
        first_row : first_row + rows[1] - rows[0],
        first_key : first_key + keys[1] - keys[0],
    ]
    return random <= largest_kept_byte(dropout_p)


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
    offset = rng_state[1] + (sequences << 21)[:, None, None, None, None]
    offset = offset + (heads << 5)[:, None, None, None] + lanes
    counter = [_low(offset), _high(offset), tiles_r[:, None, None], tiles_c[:, None]]
    words = _philox(counter, _low(rng_state[0]), _high(rng_state[0]))
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


@torch.no_grad()
def signed_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_lse: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor,
    dropout_p: float,
    scores: Scores,
) -> torch.Tensor:
    """Returns the softmax, with the sign bit set where it is dropped.

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        k: (batch, seqlen_k, nheads_k, head_dim).
        softmax_lse: (batch, nheads, seqlen_q).
        alibi_slopes: (nheads,) or (batch, nheads), or None.
        rng_state: (2,), int64: seed and offset.
        dropout_p: probability in [0, 1).
        scores: softmax_scale, window_left, window_right and softcap.

    Returns:
        (batch, nheads, seqlen_q, seqlen_k), like q. Computed in float32 from softmax_lse, so close
        to what the kernels have, not bit for bit.
    """
    seqlen_q, seqlen_k = (torch.full((), x.shape[1], device=q.device) for x in (q, k))
    return _signed_probs(
        q, k, softmax_lse, seqlen_q, seqlen_k, alibi_slopes, rng_state, dropout_p, scores
    )


@torch.no_grad()
def varlen_signed_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    scores: Scores,
) -> torch.Tensor:
    """Returns what `signed_probs` does, of packed sequences.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_k, head_dim); with block_table (num_blocks, page_block_size, nheads_k,
            head_dim).
        softmax_lse: (nheads, total_q).
        cu_seqlens_q: (batch + 1,).
        cu_seqlens_k: (batch + 1,).
        seqused_k: (batch,), or None.
        leftpad_k: (batch,), or None.
        block_table: (batch, max_num_blocks_per_seq), or None.
        alibi_slopes: as in `signed_probs`.
        rng_state: as in `signed_probs`.
        max_seqlen_q: rows of the result.
        max_seqlen_k: columns of the result.
        dropout_p: as in `signed_probs`.
        scores: as in `signed_probs`.

    Returns:
        (batch, nheads, max_seqlen_q, max_seqlen_k), like q; 0 beyond a sequence.
    """
    seqlens_q, seqlens_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if seqused_k is not None:
        seqlens_k = seqused_k
    begin = torch.zeros_like(seqlens_k) if leftpad_k is None else leftpad_k
    seqlens_k = (seqlens_k - begin).clamp(min=0)

    row = torch.arange(max_seqlen_q, device=q.device)
    key = begin[:, None] + torch.arange(max_seqlen_k, device=q.device)
    # What lies beyond a sequence is read from somewhere else, and masked.
    rows = _within(cu_seqlens_q[:-1, None] + row, q.shape[0])
    if block_table is None:
        keys = k[_within(cu_seqlens_k[:-1, None] + key, k.shape[0])]
    else:
        page = _within(key // k.shape[1], block_table.shape[1])
        keys = k[_within(block_table.gather(1, page).long(), k.shape[0]), key % k.shape[1]]
    return _signed_probs(
        q[rows],
        keys,
        softmax_lse[:, rows].transpose(0, 1),
        seqlens_q,
        seqlens_k,
        alibi_slopes,
        rng_state,
        dropout_p,
        scores,
    )


def _within(index: torch.Tensor, size: int) -> torch.Tensor:
    return index.long().clamp(0, max(size - 1, 0))


def _signed_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_lse: torch.Tensor,
    seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor,
    dropout_p: float,
    scores: Scores,
) -> torch.Tensor:
    """Computes `signed_probs`; sequences end at seqlens, which are (batch,) or of no dimension."""
    scale, window_left, window_right, softcap = scores
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    device = q.device
    keys = k.repeat_interleave(nheads // nheads_k, dim=2)
    values = _products(q, keys) * scale
    if softcap > 0:
        values = torch.tanh(values / softcap) * softcap
    row = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_k, device=device)
    seqlens_q, seqlens_k = (x.reshape(-1, 1, 1, 1) for x in (seqlens_q, seqlens_k))
    # Positive: the key comes after the query.
    distance = key - row - (seqlens_k - seqlens_q)
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(batch, nheads)
        values = values - slopes[:, :, None, None] * distance.abs()
    visible = (row < seqlens_q) & (key < seqlens_k)
    if window_right >= 0:
        visible = visible & (distance <= window_right)
    if window_left >= 0:
        visible = visible & (distance >= -window_left)
    probs = torch.where(visible, torch.exp(values - softmax_lse[..., None]), 0.0).to(q.dtype)
    keep = keep_mask(
        rng_state,
        dropout_p,
        torch.arange(batch, device=device),
        torch.arange(nheads, device=device),
        (0, seqlen_q),
        (0, seqlen_k),
    )
    return torch.where(keep, probs, -probs)


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Returns q k^T (batch, nheads, seqlen_q, seqlen_k) in float32, whatever autocast says."""
    # Autocast knows no meta device; tensors without data have no values that it could change.
    device_type = "cpu" if q.device.type == "meta" else q.device.type
    with torch.autocast(device_type, enabled=False):
        return torch.einsum("bihd,bjhd->bhij", q.float(), k.float())
