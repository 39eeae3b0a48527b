"""S_dmask: the softmax of a call, with a sign for what dropout dropped."""

from __future__ import annotations

import torch

from ..types import Lengths, Options
from .dropout import keep_mask


@torch.no_grad()
def signed_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_lse: torch.Tensor,
    lengths: Lengths | None,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """Returns the softmax, with the sign bit set where it is dropped.

    It is (batch, nheads, seqlen_q, seqlen_k), like q; of packed sequences (batch, nheads,
    max_seqlen_q, max_seqlen_k), 0 beyond a sequence. It is computed in float32 from softmax_lse, so
    close to what the kernels have, not bit for bit.
    """
    if lengths is None:
        seqlens_q, seqlens_k = (torch.full((), x.shape[1], device=q.device) for x in (q, k))
    else:
        q, k, softmax_lse, seqlens_q, seqlens_k = _unpacked(q, k, softmax_lse, lengths)
    scale, window_left, window_right, softcap = options[1:5]
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
        options.dropout_p,
        torch.arange(batch, device=device),
        torch.arange(nheads, device=device),
        (0, seqlen_q),
        (0, seqlen_k),
    )
    return torch.where(keep, probs, -probs)


def _unpacked(
    q: torch.Tensor, k: torch.Tensor, softmax_lse: torch.Tensor, lengths: Lengths
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and softmax_lse of a packed call padded to a dense one, and the lengths.

    Padding holds other tokens.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *others = lengths
    seqused_k, leftpad_k, block_table = others
    q, k = _some(q), _some(k)
    softmax_lse = _some(softmax_lse.transpose(0, 1))
    seqlens_q, seqlens_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if seqused_k is not None:
        seqlens_k = seqused_k
    begin = torch.zeros_like(seqlens_k) if leftpad_k is None else leftpad_k
    seqlens_k = (seqlens_k - begin).clamp(min=0)

    row = torch.arange(max_seqlen_q, device=q.device)
    key = begin[:, None] + torch.arange(max_seqlen_k, device=q.device)
    # Indices beyond a sequence read other tokens, which are masked later.
    rows = _within(cu_seqlens_q[:-1, None] + row, q.shape[0])
    if block_table is None:
        keys = k[_within(cu_seqlens_k[:-1, None] + key, k.shape[0])]
    else:
        page = _within(key // k.shape[1], block_table.shape[1])
        keys = k[_within(block_table.gather(1, page).long(), k.shape[0]), key % k.shape[1]]
    return q[rows], keys, softmax_lse[rows].transpose(1, 2), seqlens_q, seqlens_k


def _some(tokens: torch.Tensor) -> torch.Tensor:
    """Returns at least one token, for indices of padding."""
    return tokens if tokens.shape[0] else tokens.new_zeros((1, *tokens.shape[1:]))


def _within(index: torch.Tensor, size: int) -> torch.Tensor:
    return index.long().clamp(0, max(size - 1, 0))


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Returns q k^T (batch, nheads, seqlen_q, seqlen_k) in float32, also under autocast."""
    # Autocast does not support the meta device, where there are no values to change.
    device_type = "cpu" if q.device.type == "meta" else q.device.type
    with torch.autocast(device_type, enabled=False):
        return torch.einsum("bihd,bjhd->bhij", q.float(), k.float())
