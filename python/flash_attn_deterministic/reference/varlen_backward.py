"""Gradients of attention over packed sequences."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from .backward import Gradients, KeySums, attend_backward
from .dense import batch_slopes
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack

PackedSums = tuple[torch.Tensor, torch.Tensor]


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
    alibi_slopes: torch.Tensor | None = None,
    sums: PackedSums | None = None,
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
        alibi_slopes: as in `attention`.
        sums: sums over earlier rows of dk without softmax_scale and of dv, each (total_k, nheads,
            head_dim) in the computing dtype. These rows are added in place; `finish_key_sums` makes
            gradients of the sums.
        **options: as in `attention_backward`.

    Returns:
        dq, dk and dv, like q, k and v; 0 for tokens of no sequence. With sums, dk and dv are 0.

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
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))

    def stacked(packed: torch.Tensor, where: list[slice], sequences: list[int]) -> torch.Tensor:
        return torch.stack([packed[where[b]] for b in sequences])

    # Sequences of equal length are computed together; bits don't depend on that.
    alike = defaultdict(list)
    for sequence, (row, key) in enumerate(zip(rows, keys, strict=True)):
        alike[row.stop - row.start, key.stop - key.start].append(sequence)
    for (seqlen_q, seqlen_k), sequences in alike.items():
        if seqlen_q == 0 or seqlen_k == 0:
            continue
        carried = None
        if sums is not None:
            carried = KeySums(*(_by_head(stacked(x, keys, sequences), k.shape[1]) for x in sums))
        gradients = attend_backward(
            walk,
            stacked(dout, rows, sequences),
            stacked(q, rows, sequences),
            stacked(k, keys, sequences),
            stacked(v, keys, sequences),
            stacked(out, rows, sequences),
            stacked(softmax_lse.transpose(0, 1), rows, sequences).transpose(1, 2),
            None if slopes is None else slopes[sequences],
            sequences,
            carried,
        )
        for index, b in enumerate(sequences):
            dq[rows[b]], dk[keys[b]], dv[keys[b]] = (x[index] for x in gradients)
            if sums is not None and carried is not None:
                for packed, by_head in zip(sums, carried, strict=True):
                    packed[keys[b]] = by_head[index].flatten(0, 1).transpose(0, 1)
    return dq, dk, dv


def finish_key_sums(
    sums: PackedSums, k: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns the sums over all rows into dk and dv.

    Args:
        sums: as in `varlen_attention_backward`, for any keys: (keys, nheads, head_dim).
        k: (any tokens, nheads_k, head_dim), in the dtype of the gradients.
        softmax_scale: as there.

    Returns:
        dk and dv, (keys, nheads_k, head_dim).
    """
    walk = Walk.of(k, softmax_scale)
    by_head = KeySums(*(_by_head(total[None], k.shape[1]) for total in sums))
    dk, dv = (x[0].transpose(0, 1) for x in by_head.finish(walk, k.dtype))
    return dk, dv


def _by_head(packed: torch.Tensor, nheads_k: int) -> torch.Tensor:
    """(batch, keys, nheads, head_dim) as (batch, nheads_k, group, keys, head_dim)."""
    batch, keys, nheads, head_dim = packed.shape
    grouped = packed.reshape(batch, keys, nheads_k, nheads // nheads_k, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).contiguous()
