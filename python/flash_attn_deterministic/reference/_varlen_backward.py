"""Gradients of attention over packed sequences."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch

from ._backward import Gradients, attend_backward
from ._dense import batch_slopes
from ._dropout import Dropout
from ._formats import DEFAULT_FORMATS, Formats
from ._walk import Walk
from ._window import Window


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
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    block_n: int | None = None,
    formats: Formats = DEFAULT_FORMATS,
) -> Gradients:
    """Computes the gradients of `varlen_attention`, each sequence the same bits as alone.

    Args:
        dout: (total_q, nheads, head_dim), the gradient of out.
        q: as in `varlen_attention`.
        k: (total_k, nheads_k, head_dim).
        v: like k.
        out: what `varlen_attention` returned.
        softmax_lse: what `varlen_attention` returned.
        cu_seqlens_q: as in `varlen_attention`.
        cu_seqlens_k: as in `varlen_attention`.
        softmax_scale: as in `attention`.
        causal: as in `attention`.
        window: as in `attention`.
        softcap: as in `attention`.
        alibi_slopes: as in `attention`.
        dropout_p: as in `attention`.
        rng_state: as in `varlen_attention`.
        block_n: as in `attention`; changes no bit.
        formats: as in `attention_backward`.

    Returns:
        dq, dk and dv, like q, k and v. What belongs to no sequence: 0.

    Raises:
        DtypeError: as in `attention`.
        ArgumentError: as in `attention`.
    """
    visible = Window.of(causal, window)
    dropout = Dropout.of(dropout_p, rng_state)
    walk = Walk.of(q, softmax_scale, visible, softcap, 0, block_n, formats, dropout)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, keys = (
        list(itertools.starmap(slice, itertools.pairwise(starts)))
        for starts in (q_starts, k_starts)
    )
    slopes = batch_slopes(alibi_slopes, len(rows))
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))

    def stacked(packed: torch.Tensor, where: list[slice], sequences: list[int]) -> torch.Tensor:
        return torch.stack([packed[where[b]] for b in sequences])

    # Equally long sequences go together; bits don't depend on that.
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
            stacked(softmax_lse.transpose(0, 1), rows, sequences).transpose(1, 2),
            None if slopes is None else slopes[sequences],
            sequences,
        )
        for index, b in enumerate(sequences):
            dq[rows[b]], dk[keys[b]], dv[keys[b]] = (x[index] for x in gradients)
    return dq, dk, dv
