"""The backward: a batch's rows walk over their keys, first to last.

As in the forward every step is an elementwise IEEE operation, and sums run in one order: over the
keys of a row for dq, from the beginning of the sequence. dk and dv are a tree, as in the kernels:
rows are cut into chunks from the beginning of the sequence, whose rows are added one
after another for each query head. In a chunk, heads that share their keys are added one after
another, unrounded; chunks are added in pairs, and so on. Blocks that no row of a tile sees are
skipped: they would add zeros, and zeros become +0 in the end.

With P the weights before dropout, and Z the kept weights divided by the probability of keeping:
dv = Z^T dout; dP = dout v^T, masked and scaled like Z; dS = P (dP - D), with D the sum of
dout * out over a row less the gradient of its log-sum-exp; dq = dS k and dk = dS^T q, times
softmax_scale (FlashAttention-2, section 3.1.2; Dao, 2023). softcap c puts 1 - tanh(s / c)^2 into
dS. A sink has the gradient -P D, summed over the rows of its head.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from .. import tree
from ..types import Gradients
from . import ieee
from .batch import Batch, Tile
from .formats import round_to
from .state import INF
from .walk import Walk, add_products, copy, fold

# Of dk and dv, or sums of them.
KeyGradients = tuple[torch.Tensor, torch.Tensor]


def attend_backward(
    batch: Batch, of_forward: Sequence[torch.Tensor], unrounded: bool = False
) -> Gradients:
    """Computes `attention_backward` of a batch, of its dout, out, softmax_lse and dlse.

    Where `unrounded`, dk and dv are sums in the computing dtype, and dk is without softmax_scale.
    """
    dout, out, softmax_lse, dlse = of_forward
    walk, q, k, v = batch.walk, batch.q, batch.k, batch.v
    of_rows = [batch.grouped(x) for x in (q, dout, out)]
    of_rows += [batch.grouped(x.transpose(1, 2)[..., None]) for x in (softmax_lse, dlse)]
    dq = q.new_zeros(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=walk.dtype if unrounded else x.dtype) for x in (k, v))
    for (sequence, heads_k), group in itertools.groupby(
        batch.tiles(), lambda tile: (tile.batch, tile.heads_k)
    ):
        chunks: dict[int, KeyGradients] = {}
        for tile in group:
            chunk = tile.rows.start // tree.CHUNK_ROWS
            if chunk not in chunks:
                chunks[chunk] = _no_sums(tile, tile.k), _no_sums(tile, tile.v)
            dq_rows = _add_rows(tile, chunks[chunk], [tile.of(x) for x in of_rows])
            dq_rows = _rounded(dq_rows, q.dtype).flatten(1, 2).transpose(1, 2)
            dq[tile.batch, tile.rows, tile.heads] = dq_rows
        gradients = _added(chunks)
        if not unrounded:
            gradients = finish(walk, gradients, k.dtype)
        for result, gradient in zip((dk, dv), gradients, strict=True):
            result[sequence, :, heads_k] = gradient.transpose(1, 2)
    return dq, dk, dv


def _no_sums(tile: Tile, keys: torch.Tensor) -> torch.Tensor:
    """Returns sums over rows of a chunk: (batch, nheads_k, group, seqlen_k, head_dim)."""
    batch, seqlen_k, nheads_k, head_dim = keys.shape
    group = (tile.heads.stop - tile.heads.start) // nheads_k
    return keys.new_zeros((batch, nheads_k, group, seqlen_k, head_dim), dtype=tile.walk.dtype)


def _added(chunks: dict[int, KeyGradients]) -> KeyGradients:
    """Adds up the heads of a group, then the chunks of a sequence."""
    leaves = {
        (0, chunk): [functools.reduce(torch.add, total.unbind(2)) for total in sums]
        for chunk, sums in chunks.items()
    }
    total = tree.add_up(
        leaves, len(chunks), lambda one, two: [x + y for x, y in zip(one, two, strict=True)]
    )
    assert total is not None
    return total[0], total[1]


def finish(walk: Walk, sums: KeyGradients, dtype: torch.dtype) -> KeyGradients:
    """Scales and rounds the sums over all rows."""
    dk, dv = (
        _rounded(total if factor is None else total * factor, dtype)
        for total, factor in zip(sums, (walk.score_scale, walk.keep_scale), strict=True)
    )
    return dk, dv


def _add_rows(tile: Tile, sums: KeyGradients, of_rows: list[torch.Tensor]) -> torch.Tensor:
    """Adds a tile of q, dout, out, lse and dlse to the sums of dk and dv; returns its dq."""
    walk, formats = tile.walk, tile.walk.formats
    q, dout, out, lse, dlse = of_rows
    # Rows without a key contribute nothing, even if their gradient is NaN.
    dout = dout.masked_fill(lse == INF, 0.0)
    delta = _row_sums(dout * out) - dlse
    lse_log2 = lse * math.log2(math.e)
    dq = torch.zeros_like(q)
    begin, end = walk.window.visible(tile.positions, tile.k.shape[1])
    for start in range(begin // walk.block_n * walk.block_n, end, walk.block_n):
        keys = range(start, min(start + walk.block_n, end))
        span = slice(keys.start, keys.stop)
        scores, capped, k = tile.scores(q, keys)
        scores = scores * walk.scale_log2 - lse_log2
        hidden = tile.hidden(keys)
        if hidden is not None:
            scores.masked_fill_(hidden, -INF)
        probs = ieee.exp2(scores)

        dprobs = torch.zeros_like(probs)
        v = copy(tile.v[:, span].permute(0, 2, 3, 1), walk.dtype)
        add_products(dprobs, dout, v[:, :, None])
        dprobs = round_to(dprobs, formats.dprobs)
        weights = round_to(probs, formats.probs)
        kept = tile.kept(keys)
        if kept is not None and walk.keep_scale is not None:
            dprobs = torch.where(kept, dprobs * walk.keep_scale, 0.0)
            weights = torch.where(kept, weights, 0.0)
        dscores = probs * (dprobs - delta)
        if capped is not None:
            dscores *= 1.0 - capped * capped
        dscores = round_to(dscores, formats.dscores)

        add_products(dq, dscores, k.transpose(-1, -2)[:, :, None])
        for total, left, right in zip(sums, (dscores, weights), (q, dout), strict=True):
            part = total[..., span, :].contiguous()
            add_products(part, left.transpose(-1, -2), right)
            total[..., span, :] = part
    return dq.mul_(walk.score_scale)


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Adds up the last dimension, which stays, by halving it."""
    return fold(values, 1 << max(values.shape[-1] - 1, 0).bit_length(), torch.add, 0.0)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds, and makes every zero +0 and every NaN the same; see `normalise` and `attend`."""
    values = values.masked_fill(values == 0, 0.0).to(dtype)
    return values.masked_fill_(values.isnan(), float("nan"))


@torch.no_grad()
def sink_backward(
    dout: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    learnable_sink: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the gradient of `attention` or `varlen_attention` with respect to learnable_sink.

    The rows of a sequence are added up by themselves, then sequences first to last.

    Args:
        dout: the gradient of out, like it.
        out: as the forward returned it; it may be in a wider dtype.
        softmax_lse: as the forward returned it.
        learnable_sink: (nheads,), as of the forward.
        cu_seqlens_q: (batch + 1,), int32, of packed sequences.
        dlse: the gradient of softmax_lse, like it; None: 0.

    Returns:
        dsink, (nheads,), in the dtype of softmax_lse.
    """
    dtype = softmax_lse.dtype
    nheads = learnable_sink.shape[0]
    delta = _row_sums(dout.to(dtype) * out.to(dtype)).squeeze(-1)
    delta = delta.transpose(-1, -2)  # as softmax_lse
    if dlse is not None:
        delta = delta - dlse
    sinks = learnable_sink.to(dtype)[:, None]
    rows = ieee.exp2((sinks - softmax_lse) * math.log2(math.e)) * -delta
    if cu_seqlens_q is None:
        sequences = list(rows)
    else:
        sequences = [rows[:, begin:end] for begin, end in itertools.pairwise(cu_seqlens_q.tolist())]
    total = torch.zeros(nheads, dtype=dtype, device=out.device)
    for sequence in sequences:
        total = total + _row_sums(sequence).squeeze(-1)
    return total
