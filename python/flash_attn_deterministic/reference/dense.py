"""Attention over batches of equally long sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..types import Outputs
from .dropout import Place
from .formats import DEFAULT_FORMATS
from .walk import Options, Walk

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Elements of the largest tensor of a step. Up to this size it stays in the L2 cache, and torch runs
# an operation on the calling thread: the thread pool gains little on such steps, and on a busy
# machine its barriers can make them a hundred times slower.
_TILE_ELEMENTS = 32 * 1024
_MAX_TILE_ROWS = 128


@torch.no_grad()
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention in the kernels' order of operations.

    Query i has the position i + seqlen_k - seqlen_q among the keys.

    Args:
        q: (batch, seqlen_q, nheads, head_dim); float16, bfloat16, float32 or float64.
        k: (batch, seqlen_k, nheads_k, head_dim), like q; nheads is a multiple of nheads_k.
        v: like k.
        alibi_slopes: (nheads,) or (batch, nheads); slope times the distance between the positions
            of query and key is subtracted from the score.
        softmax_scale: factor of q k^T; None: head_dim ** -0.5.
        causal: whether a query sees no key after its position; as a right window of 0.
        window: how many keys before and after its position a query sees; negative: all.
        softcap: where positive, scores are softcap * tanh(scores / softcap).
        dropout_p: probability that a weight is dropped; the others are divided by 1 - dropout_p.
        rng_state: (2,), int64: seed and offset of the dropout mask.
        split_size: tokens per split, a multiple of block_n; 0: one split. Of the forward.
        block_n: keys per block, a power of two; None: that of the kernel for this head_dim.
        formats: number format of each step.
        learnable_sink: (nheads,), one more score of each row, without a value, that is not scaled.

    Returns:
        out (batch, seqlen_q, nheads, head_dim) in q's dtype, and softmax_lse (batch, nheads,
        seqlen_q) in float32 (float64 for float64 inputs). Rows without a visible key: out 0,
        softmax_lse +inf, or the sink.

    Raises:
        DtypeError: q has another dtype.
        ArgumentError: split_size or block_n is not as above.
    """
    walk = Walk.of(q, **options)
    sequences = list(range(q.shape[0]))
    return attend(walk, q, k, v, batch_slopes(alibi_slopes, q.shape[0]), sequences)


def batch_slopes(alibi_slopes: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Returns the slopes as (batch, nheads)."""
    return None if alibi_slopes is None else alibi_slopes.expand(batch, alibi_slopes.shape[-1])


def attend(
    walk: Walk,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    sequences: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a walk over tensors as in `attention`; slopes (batch, nheads), indices of sequences."""
    group = q.shape[2] // k.shape[2]
    q_groups = q.reshape(*q.shape[:2], k.shape[2], group, q.shape[3])
    slope_groups = None if slopes is None else slopes.reshape(q.shape[0], k.shape[2], group)
    out = q.new_empty(q.shape)
    softmax_lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=walk.dtype)
    for batch, heads_k, rows in tiles(q.shape, k.shape[2], walk.block_n):
        heads = slice(heads_k.start * group, heads_k.stop * group)
        out_tile, lse_tile = walk.rows(
            # (batch, nheads_k, group, rows, head_dim): a group shares its keys.
            q_groups[batch, rows, heads_k].permute(0, 2, 3, 1, 4),
            k[batch, :, heads_k],
            v[batch, :, heads_k],
            None if slope_groups is None else slope_groups[batch, heads_k],
            rows.start + k.shape[1] - q.shape[1],
            Place(sequences[batch], range(heads_k.start, heads_k.stop), rows.start),
        )
        out[batch, rows, heads] = out_tile.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        softmax_lse[batch, heads, rows] = lse_tile.flatten(1, 2)
    for result in (out, softmax_lse):
        # The bits of a converted NaN differ between torch's vector and scalar loops.
        result.masked_fill_(result.isnan(), float("nan"))
    return out, softmax_lse


def tiles(q_shape: torch.Size, nheads_k: int, block_n: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields (batch, nheads_k, seqlen_q) ranges that cover q; bits don't depend on the cut."""
    batch, seqlen_q, nheads, head_dim = q_shape
    row_elements = nheads // nheads_k * max(block_n, head_dim)
    rows = max(1, min(seqlen_q, _MAX_TILE_ROWS, _TILE_ELEMENTS // row_elements))
    pairs = max(1, _TILE_ELEMENTS // (rows * row_elements))
    heads = min(nheads_k, pairs)
    sequences = max(1, pairs // nheads_k)
    for b in range(0, batch, sequences):
        for h in range(0, nheads_k, heads):
            for r in range(0, seqlen_q, rows):
                yield (
                    slice(b, min(b + sequences, batch)),
                    slice(h, min(h + heads, nheads_k)),
                    slice(r, min(r + rows, seqlen_q)),
                )


def with_residual(
    attention: Callable[..., Outputs], q: torch.Tensor, *tensors: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention, dense or packed, and the rounding error of out.

    The backward subtracts D, the sum of dout * out over a row, from numbers that are close to D
    where keys are alike: rounding out to 16 bit then costs dq most of its digits.

    Returns:
        out and softmax_lse as there, bit for bit, and the residual: unrounded out minus out, shaped
        like it, in bfloat16.
    """
    # With q in float32, out is not rounded; all other steps round as for q's dtype.
    options["formats"] = options.get("formats", DEFAULT_FORMATS).filled(q.dtype)
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    exact, softmax_lse = attention(wide, *tensors, **options)
    out = exact.to(q.dtype)
    out.masked_fill_(out.isnan(), float("nan"))
    return out, softmax_lse, (exact - out).to(torch.bfloat16)


def restored(out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns out for the backward: in float32 with its residual, if there is one."""
    return out if residual is None else out.float() + residual
