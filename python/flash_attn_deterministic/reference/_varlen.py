"""Attention over packed sequences."""

from __future__ import annotations

import itertools

import torch

from ..errors import ArgumentError
from ._dense import batch_slopes
from ._dropout import Dropout
from ._formats import DEFAULT_FORMATS, Formats
from ._lengths import check_each, check_longest, check_pages, check_starts
from ._sequences import Slots, attend_sequences
from ._walk import Walk
from ._window import Window


@torch.no_grad()
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    split_size: int = 0,
    block_n: int | None = None,
    formats: Formats = DEFAULT_FORMATS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over packed sequences, each the same bits as alone in `attention`.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_k, head_dim); with block_table (num_pages, page_size, nheads_k,
            head_dim).
        v: like k.
        cu_seqlens_q: (batch + 1,), where each sequence's queries begin in q, and the last end.
        cu_seqlens_k: (batch + 1,), the same for k; with block_table only the lengths count.
        max_seqlen_q: at least the queries of each sequence; None: not said. Changes nothing: every
            sequence is computed to its end.
        max_seqlen_k: the same of the keys that count.
        softmax_scale: as in `attention`.
        causal: as in `attention`.
        seqused_k: (batch,), the end of each sequence's keys, counted from where they begin; None:
            all of them. What lies beyond is not read.
        leftpad_k: (batch,), the keys to skip at the beginning of each sequence. Position 0 is the
            first key after them.
        block_table: (batch, max_pages), the pages of each sequence.
        window: as in `attention`.
        softcap: as in `attention`.
        alibi_slopes: as in `attention`.
        dropout_p: as in `attention`.
        rng_state: as in `attention`; the mask of a sequence depends on its index in the batch.
        split_size: as in `attention`.
        block_n: as in `attention`.
        formats: as in `attention`.

    Returns:
        out (total_q, nheads, head_dim) and softmax_lse (nheads, total_q), otherwise as in
        `attention`. Rows that belong to no sequence: out 0, softmax_lse +inf.

    Raises:
        DtypeError: as in `attention`.
        ArgumentError: as in `attention`; both leftpad_k and block_table are given; or a length, a
            start or a page that can't be.
    """
    if leftpad_k is not None and block_table is not None:
        raise ArgumentError("leftpad_k: expected None with a block_table; leave out one of the two")
    visible = Window.of(causal, window)
    dropout = Dropout.of(dropout_p, rng_state)
    walk = Walk.of(q, softmax_scale, visible, softcap, split_size, block_n, formats, dropout)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    seqlens_q = [end - begin for begin, end in itertools.pairwise(q_starts)]
    batch = len(seqlens_q)
    skipped = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    rooms = [end - begin for begin, end in itertools.pairwise(k_starts)]
    ends = rooms if seqused_k is None else seqused_k.tolist()
    check_starts("cu_seqlens_q", q_starts, q.shape[0])
    if block_table is None:
        check_starts("cu_seqlens_k", k_starts, k.shape[0])
        check_each("seqused_k", ends, rooms, "the keys that cu_seqlens_k has room for")
        check_each("leftpad_k", skipped, ends, "the length")
    else:
        if seqused_k is None:
            check_starts("cu_seqlens_k", k_starts)
        else:
            capacity = block_table.shape[1] * k.shape[1]
            check_each("seqused_k", ends, [capacity] * batch, "the tokens of its pages")
        check_pages(block_table, k.shape[1], k.shape[0], ends)
    seqlens_k = [end - begin for begin, end in zip(skipped, ends, strict=True)]
    check_longest("max_seqlen_q", max_seqlen_q, seqlens_q)
    check_longest("max_seqlen_k", max_seqlen_k, seqlens_k)
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
