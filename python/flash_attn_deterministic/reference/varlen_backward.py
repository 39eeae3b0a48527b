"""Gradients of attention over packed sequences."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from .backward import Gradients, KeyGradients, attend_backward, finish
from .dense import batch_slopes
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def varlen_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    unrounded: bool = False,
    **options: Unpack[Options],
) -> Gradients:
    """Computes the gradients of `varlen_attention`, each sequence the same bits as alone.

    Args:
        dout: (total_q, nheads, head_dim), the gradient of out.
        q: as in `varlen_attention`.
        k: (total_k, nheads_k, head_dim).
        v: like k.
        out: as `varlen_attention` returned it.
        softmax_lse: as `varlen_attention` returned it.
        cu_seqlens_q: as in `varlen_attention`.
        cu_seqlens_k: as in `varlen_attention`.
        max_seqlen_q: no effect.
        max_seqlen_k: no effect.
        dlse: the gradient of softmax_lse, like it; None: 0.
        alibi_slopes: as in `attention`.
        unrounded: return dk without softmax_scale, and dv, in the computing dtype: what
            `finish_key_sums` takes, for some of the rows or for all.
        **options: as in `attention_backward`.

    Returns:
        dq, dk and dv, like q, k and v; 0 for tokens of no sequence.

    Raises:
        DtypeError: as in `attention`.
        ArgumentError: as in `attention`.
    """
    walk = Walk.of(q, **options)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, keys = (
        list(itertools.starmap(slice, itertools.pairwise(starts)))
        for starts in (q_starts, k_starts)
    )
    slopes = batch_slopes(alibi_slopes, len(rows))
    dq = q.new_zeros(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=walk.dtype if unrounded else x.dtype) for x in (k, v))

    def stacked(packed: torch.Tensor, where: list[slice], sequences: list[int]) -> torch.Tensor:
        return torch.stack([packed[where[b]] for b in sequences])

    def of_rows(numbers: torch.Tensor, sequences: list[int]) -> torch.Tensor:
        """(nheads, total_q) as (batch, nheads, seqlen_q)."""
        return stacked(numbers.transpose(0, 1), rows, sequences).transpose(1, 2)

    # Sequences of equal length are computed together; bits don't depend on that.
    alike = defaultdict(list)
    for sequence, (row, key) in enumerate(zip(rows, keys, strict=True)):
        alike[row.stop - row.start, key.stop - key.start].append(sequence)
    for (seqlen_q, seqlen_k), sequences in alike.items():
        if seqlen_q == 0 or seqlen_k == 0:
            continue
        gradients = attend_backward(
            walk,
            stacked(dout, rows, sequences),
            stacked(q, rows, sequences),
            stacked(k, keys, sequences),
            stacked(v, keys, sequences),
            stacked(out, rows, sequences),
            of_rows(softmax_lse, sequences),
            None if slopes is None else slopes[sequences],
            sequences,
            unrounded,
            None if dlse is None else of_rows(dlse, sequences),
        )
        for index, b in enumerate(sequences):
            dq[rows[b]], dk[keys[b]], dv[keys[b]] = (x[index] for x in gradients)
    return dq, dk, dv


def finish_key_sums(sums: KeyGradients, k: torch.Tensor, softmax_scale: float) -> KeyGradients:
    """Turns the sums over all rows into dk and dv.

    Args:
        sums: of dk without softmax_scale, and of dv: (keys, nheads_k, head_dim), for any keys.
        k: (any tokens, nheads_k, head_dim), in the dtype of the gradients.
        softmax_scale: as there.

    Returns:
        dk and dv, like the sums.
    """
    return finish(Walk.of(k, softmax_scale), sums, k.dtype)
