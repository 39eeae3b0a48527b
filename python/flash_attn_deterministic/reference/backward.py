"""Gradients of attention over batches of equally long sequences.

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
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import tree
from . import ieee
from .dense import batch_slopes, tiles
from .dropout import Place
from .formats import round_to
from .state import INF
from .walk import Options, Walk, add_products, copy, fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Unpack

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Of dk and dv, or sums of them.
KeyGradients = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Computes the gradients of `attention` with respect to q, k and v.

    Args:
        dout: (batch, seqlen_q, nheads, head_dim), the gradient of out.
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        out: as `attention` returned it.
        softmax_lse: as `attention` returned it.
        dlse: the gradient of softmax_lse, like it; None: 0.
        alibi_slopes: as in `attention`.
        **options: as in `attention`; split_size and block_n change no bit.

    Returns:
        dq, dk and dv, like q, k and v. Rows without a visible key, and keys that no row sees: 0.

    Raises:
        DtypeError: as in `attention`.
        ArgumentError: as in `attention`.
    """
    walk = Walk.of(q, **options)
    slopes = batch_slopes(alibi_slopes, q.shape[0])
    sequences = list(range(q.shape[0]))
    return attend_backward(walk, dout, q, k, v, out, softmax_lse, slopes, sequences, dlse=dlse)


def attend_backward(
    walk: Walk,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    slopes: torch.Tensor | None,
    sequences: list[int],
    unrounded: bool = False,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """Computes `attention_backward` of a walk; slopes and sequences as in `attend`.

    Where `unrounded`, dk and dv are sums in the computing dtype, and dk is without softmax_scale.
    """
    batch_size, seqlen_k, nheads_k, _ = k.shape
    group = q.shape[2] // nheads_k

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        """(batch, rows, nheads, head_dim) as (batch, nheads_k, group, rows, head_dim)."""
        shape = (*tensor.shape[:2], nheads_k, group, tensor.shape[3])
        return tensor.reshape(shape).permute(0, 2, 3, 1, 4)

    q_rows, dout_rows, out_rows = grouped(q), grouped(dout), grouped(out)
    dlse = torch.zeros_like(softmax_lse) if dlse is None else dlse
    lse_rows, dlse_rows = (
        x.reshape(batch_size, nheads_k, group, -1, 1) for x in (softmax_lse, dlse)
    )
    slope_groups = None if slopes is None else slopes.reshape(batch_size, nheads_k, group)
    dq = q.new_zeros(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=walk.dtype if unrounded else x.dtype) for x in (k, v))
    cut = tiles(q.shape, nheads_k, walk.block_n)
    for (batch, heads_k), parts in itertools.groupby(cut, key=lambda tile: tile[:2]):
        chunks = [
            KeySums.empty(walk, k[batch, :, heads_k], group)
            for _ in range(0, max(q.shape[1], 1), tree.CHUNK_ROWS)
        ]
        for rows in _within_chunks(rows for _, _, rows in parts):
            sums = chunks[rows.start // tree.CHUNK_ROWS]
            dq_rows = _add_rows(
                walk,
                sums,
                _Rows(
                    *(
                        x[batch, heads_k, :, rows].to(walk.dtype).contiguous()
                        for x in (q_rows, dout_rows, out_rows, lse_rows, dlse_rows)
                    )
                ),
                k[batch, :, heads_k],
                v[batch, :, heads_k],
                None if slope_groups is None else slope_groups[batch, heads_k],
                rows.start + seqlen_k - q.shape[1],
                Place(sequences[batch], range(heads_k.start, heads_k.stop), rows.start),
            )
            heads = slice(heads_k.start * group, heads_k.stop * group)
            dq[batch, rows, heads] = _rounded(dq_rows, q.dtype).flatten(1, 2).transpose(1, 2)
        gradients = add_chunks([chunk.of_heads() for chunk in chunks])
        if not unrounded:
            gradients = finish(walk, gradients, k.dtype)
        for result, gradient in zip((dk, dv), gradients, strict=True):
            result[batch, :, heads_k] = gradient.transpose(1, 2)
    return dq, dk, dv


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
    products = dout.to(dtype) * out.to(dtype)
    delta = fold(products, 1 << (products.shape[-1] - 1).bit_length(), torch.add, 0.0).squeeze(-1)
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
        length = 1 << max(sequence.shape[1] - 1, 0).bit_length()
        total = total + fold(sequence, length, torch.add, 0.0).squeeze(-1)
    return total


def _within_chunks(tiles_of_rows: Iterable[slice]) -> Iterator[slice]:
    """Cuts tiles of rows where chunks begin."""
    for rows in tiles_of_rows:
        begin = rows.start
        while begin < rows.stop:
            end = min(rows.stop, (begin // tree.CHUNK_ROWS + 1) * tree.CHUNK_ROWS)
            yield slice(begin, end)
            begin = end


def add_chunks(chunks: list[KeyGradients]) -> KeyGradients:
    """Adds the sums of all chunks of a sequence."""
    leaves = {(0, index): sums for index, sums in enumerate(chunks)}
    total = tree.add_up(leaves, len(chunks), lambda one, two: (one[0] + two[0], one[1] + two[1]))
    assert total is not None
    return total


def finish(walk: Walk, sums: KeyGradients, dtype: torch.dtype) -> KeyGradients:
    """Scales and rounds the sums over all rows."""
    dk, dv = (
        _rounded(total if factor is None else total * factor, dtype)
        for total, factor in zip(sums, (walk.score_scale, walk.keep_scale), strict=True)
    )
    return dk, dv


class _Rows(NamedTuple):
    """A tile of rows: (batch, nheads_k, group, rows, head_dim); lse and dlse (..., rows, 1)."""

    q: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor


class KeySums(NamedTuple):
    """Sums over rows of a chunk so far: (batch, nheads_k, group, seqlen_k, head_dim) each."""

    dk: torch.Tensor
    dv: torch.Tensor

    @classmethod
    def empty(cls, walk: Walk, k: torch.Tensor, group: int) -> KeySums:
        batch, seqlen_k, nheads_k, head_dim = k.shape
        shape = (batch, nheads_k, group, seqlen_k, head_dim)
        return cls(*(torch.zeros(shape, dtype=walk.dtype, device=k.device) for _ in range(2)))

    def of_heads(self) -> KeyGradients:
        """Returns the sums of all heads of a group, (batch, nheads_k, seqlen_k, head_dim) each."""
        dk, dv = (functools.reduce(torch.add, total.unbind(2)) for total in self)
        return dk, dv


def _add_rows(
    walk: Walk,
    sums: KeySums,
    tile: _Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    position: int,
    place: Place,
) -> torch.Tensor:
    """Adds a tile of rows to the sums of dk and dv, and returns its dq; see `Walk.rows`."""
    formats = walk.formats
    q, dout, out, lse, dlse = tile
    # Rows without a key contribute nothing, even if their gradient is NaN.
    dout = dout.masked_fill(lse == INF, 0.0)
    products = dout * out
    delta = fold(products, 1 << (products.shape[-1] - 1).bit_length(), torch.add, 0.0) - dlse
    lse_log2 = lse * math.log2(math.e)
    if slopes is not None:
        slopes = walk.bias_slopes(slopes)
    dq = torch.zeros_like(q)
    rows = range(position, position + q.shape[3])
    begin, end = walk.window.visible(rows, k.shape[1])
    for start in range(begin // walk.block_n * walk.block_n, end, walk.block_n):
        keys = range(start, min(start + walk.block_n, end))
        span = slice(keys.start, keys.stop)
        # (batch, nheads_k, head_dim, keys)
        k_block = copy(k[:, span].permute(0, 2, 3, 1), walk.dtype)
        v_block = copy(v[:, span].permute(0, 2, 3, 1), walk.dtype)
        scores, capped = walk.scores(q, k_block, slopes, rows, keys)
        scores = scores * walk.scale_log2 - lse_log2
        hidden = walk.window.hidden(rows, keys, q.device)
        if hidden is not None:
            scores.masked_fill_(hidden, -INF)
        probs = ieee.exp2(scores)

        dprobs = torch.zeros_like(probs)
        add_products(dprobs, dout, v_block[:, :, None])
        dprobs = round_to(dprobs, formats.dprobs)
        weights = round_to(probs, formats.probs)
        if walk.dropout is not None and walk.keep_scale is not None:
            keep = walk.dropout.keep(place, q.shape[2], rows, keys)
            dprobs = torch.where(keep, dprobs * walk.keep_scale, 0.0)
            weights = torch.where(keep, weights, 0.0)
        dscores = probs * (dprobs - delta)
        if capped is not None:
            dscores *= 1.0 - capped * capped
        dscores = round_to(dscores, formats.dscores)

        add_products(dq, dscores, k_block.transpose(-1, -2)[:, :, None])
        for total, left, right in ((sums.dk, dscores, q), (sums.dv, weights, dout)):
            part = total[..., span, :].contiguous()
            add_products(part, left.transpose(-1, -2), right)
            total[..., span, :] = part
    return dq.mul_(walk.score_scale)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds, and makes every zero +0 and every NaN the same; see `normalise` and `attend`."""
    values = values.masked_fill(values == 0, 0.0).to(dtype)
    return values.masked_fill_(values.isnan(), float("nan"))
