"""Attention over packed sequences."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from .dense import batch_slopes
from .sequences import Slots, attend_sequences
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over packed sequences, each the same bits as alone in `attention`.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_k, head_dim); with block_table (num_pages, page_size, nheads_k,
            head_dim).
        v: like k.
        cu_seqlens_q: (batch + 1,), where each sequence's queries begin in q, and the last end.
        cu_seqlens_k: (batch + 1,), the same for k; with block_table only the lengths count.
        max_seqlen_q: no effect: every sequence is computed to its end.
        max_seqlen_k: no effect.
        seqused_k: (batch,), the end of each sequence's keys, counted from where they begin; None:
            all of them. The rest is not read.
        leftpad_k: (batch,), the keys to skip at the beginning of each sequence. Position 0 is the
            first key after them.
        block_table: (batch, max_pages), the pages of each sequence.
        alibi_slopes: as in `attention`.
        **options: as in `attention`; a sequence's dropout mask depends on its index in the batch.

    Returns:
        out (total_q, nheads, head_dim) and softmax_lse (nheads, total_q), otherwise as in
        `attention`. Rows that belong to no sequence: out 0, softmax_lse +inf.

    Raises:
        DtypeError: as in `attention`.
        ArgumentError: as in `attention`. Lengths are not checked; see `checks.values`.
    """
    walk = Walk.of(q, **options)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    seqlens_q = [end - begin for begin, end in itertools.pairwise(q_starts)]
    batch = len(seqlens_q)
    skipped = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    if seqused_k is None:
        ends = [end - begin for begin, end in itertools.pairwise(k_starts)]
    else:
        ends = seqused_k.tolist()
    seqlens_k = [end - begin for begin, end in zip(skipped, ends, strict=True)]
    slots = None if block_table is None else Slots(k.shape[1], block_table=block_table)

    def keys(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        if slots is None:
            begin = k_starts[sequence] + skipped[sequence]
            tokens = slice(begin, begin + seqlens_k[sequence])
            return k[tokens], v[tokens]
        index = slots(sequence, 0, seqlens_k[sequence])
        return k[index], v[index]

    def rows(sequence: int) -> torch.Tensor:
        return q[q_starts[sequence] : q_starts[sequence + 1]]

    out = q.new_zeros(q.shape)
    softmax_lse = q.new_full((q.shape[1], q.shape[0]), float("inf"), dtype=walk.dtype)
    lengths = list(zip(seqlens_q, seqlens_k, strict=True))
    slopes = batch_slopes(alibi_slopes, batch)
    for sequence, out_rows, lse_rows in attend_sequences(walk, lengths, rows, keys, slopes):
        packed = slice(q_starts[sequence], q_starts[sequence + 1])
        out[packed], softmax_lse[:, packed] = out_rows, lse_rows
    return out, softmax_lse
