"""Document masks of torch's flex_attention, with the kernels of this package.

A BlockMask holds a Python function of indices. If its documents are a cut of each row of the batch,
and attention inside of each is full or causal, the same attention is a call of packed sequences,
with gradients and the bits of `flash_attn_varlen_func`. Every other mask is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..errors import ArgumentError, UnsupportedError
from ..interface import flash_attn_varlen_func

_ROWS = 1024  # of a mask that are computed at once


class Documents(NamedTuple):
    """The documents of a batch, row after row.

    Args:
        cu_seqlens: (documents + 1,), int32.
        max_seqlen: tokens of the longest.
        causal: whether the mask inside of each is causal.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    causal: bool


_found: WeakKeyDictionary[BlockMask, dict[int, Documents]] = WeakKeyDictionary()  # by batch


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes attention under a document mask, like torch's function of this name.

    Args:
        query: (batch, nheads, seqlen, head_dim), float16 or bfloat16.
        key: (batch, nheads_k, seqlen, head_dim).
        value: like key.
        score_mod: None.
        block_mask: of documents; None: one document per row, and no mask in it.
        scale: of the scores; None: head_dim ** -0.5.
        enable_gqa: whether nheads_k may be less than nheads.

    Returns:
        out (batch, nheads, seqlen, head_dim).

    Raises:
        UnsupportedError: score_mod, or a mask that is none of documents.
        ArgumentError: shapes that do not fit the mask. Others as `flash_attn_varlen_func`.

    Source:
        torch.nn.attention.flex_attention.flex_attention of torch 2.10 to 2.15.
    """
    if score_mod is not None:
        raise UnsupportedError("score_mod: expected None; use torch's flex_attention")
    batch, heads, seqlen, _ = query.shape
    if key.shape[2] != seqlen:
        raise ArgumentError(f"key: expected {seqlen} tokens, as of query, got {key.shape[2]}")
    if key.shape[1] != heads and not enable_gqa:
        raise ArgumentError(f"key: expected {heads} heads or enable_gqa, got {key.shape[1]}")
    if block_mask is None:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * seqlen
        documents = Documents(starts, seqlen, False)
    else:
        documents = documents_of(block_mask, batch, seqlen, query.device)
    starts, longest, causal = documents
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    options = starts, starts, longest, longest, 0.0, scale, causal
    out = flash_attn_varlen_func(q, k, v, *options)
    return out.view(batch, seqlen, *out.shape[1:]).transpose(1, 2)


def documents_of(block_mask: BlockMask, batch: int, seqlen: int, device: torch.device) -> Documents:
    """Returns the documents of a mask; remembers them, since all of the mask is computed.

    Raises:
        UnsupportedError: the mask is none of documents.
        ArgumentError: the mask is for other lengths or another batch.
    """
    masks, heads = block_mask.shape[:2]
    if heads != 1 or tuple(block_mask.seq_lengths) != (seqlen, seqlen):
        raise ArgumentError(
            f"block_mask: expected shape (1 or {batch}, 1, {seqlen}, {seqlen}), got "
            f"{(masks, heads, *block_mask.seq_lengths)}"
        )
    if masks not in (1, batch):
        raise ArgumentError(
            f"block_mask: expected {batch} rows of {seqlen} tokens, as of query, got {masks}"
        )
    found = _found.setdefault(block_mask, {})
    if batch not in found:
        found[batch] = _find(block_mask, batch, seqlen, device)
    return found[batch]


def _find(block_mask: BlockMask, batch: int, seqlen: int, device: torch.device) -> Documents:
    zero = torch.zeros((), dtype=torch.int64, device=device)
    place = torch.arange(seqlen, device=device)
    over_keys = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_pairs = torch.vmap(block_mask.mask_mod, in_dims=(None, None, 0, 0))
    firsts, ahead = [], []
    for b in torch.arange(batch, device=device):
        joined = over_pairs(b, zero, place[1:], place[:-1])
        first = torch.cat([joined.new_ones(1), ~joined])
        document = first.cumsum(0)
        causal = True
        if bool(joined.any()):
            forward = over_pairs(b, zero, place[:-1], place[1:])[joined]
            causal = not bool(forward.any())
            ahead.append(causal)
        for rows in torch.split(place, _ROWS):
            expected = document[rows, None] == document
            if causal:
                expected = expected & (place <= rows[:, None])
            if not torch.equal(over_rows(b, zero, rows, place), expected):
                raise UnsupportedError(
                    "block_mask: expected documents one after another, with full or causal "
                    "attention inside, got another mask; use torch's flex_attention"
                )
        firsts.append(first)
    if len(set(ahead)) > 1:
        raise UnsupportedError("block_mask: expected one kind of mask in all documents, got two")
    starts = torch.cat(firsts).nonzero()[:, 0].int()
    starts = torch.nn.functional.pad(starts, (0, 1), value=batch * seqlen)
    return Documents(starts, int(starts.diff().max()), all(ahead))
