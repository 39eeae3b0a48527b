"""The forward: each row walks over its keys, blocks and splits last to first."""

from __future__ import annotations

import torch

from . import ieee
from .batch import Batch, Tile
from .formats import round_to
from .state import INF, State, empty_state, merge_state, normalise, rescale_factor
from .walk import add_products, copy, fold


def attend(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns out, softmax_lse and row_max, as `attention` does."""
    q = batch.grouped(batch.q)
    out = batch.q.new_empty((*batch.q.shape[:3], batch.v.shape[3]))
    softmax_lse = q.new_empty(batch.q.transpose(1, 2).shape[:3], dtype=batch.walk.dtype)
    row_max = torch.empty_like(softmax_lse)
    for tile in batch.tiles():
        out_rows, lse_rows, max_rows = _rows(tile, tile.of(q))
        out_rows = out_rows.to(out.dtype).flatten(1, 2).transpose(1, 2)
        out[tile.batch, tile.rows, tile.heads] = out_rows
        softmax_lse[tile.batch, tile.heads, tile.rows] = lse_rows.flatten(1, 2)
        row_max[tile.batch, tile.heads, tile.rows] = max_rows.flatten(1, 2)
    for result in (out, softmax_lse, row_max):
        # The bits of a converted NaN differ between torch's vector and scalar loops.
        result.masked_fill_(result.isnan(), float("nan"))
    return out, softmax_lse, row_max


def _rows(tile: Tile, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs a tile over all of its keys; returns out, lse and the largest scores, not rounded."""
    walk = tile.walk
    begin, end = walk.window.visible(tile.positions, tile.k.shape[1])
    empty = empty_state(q, tile.v.shape[3])
    state: State | None = None
    split_size = walk.split_size or max(end, 1)
    for split in reversed(range(begin // split_size, -(-end // split_size))):
        part = empty
        first = max(split * split_size, begin // walk.block_n * walk.block_n)
        last = min((split + 1) * split_size, end)
        for start in reversed(range(first, last, walk.block_n)):
            part = _block(tile, part, q, range(start, min(start + walk.block_n, last)))
        state = part if state is None else merge_state(state, part, walk.scale_log2, walk.formats)
    state = empty if state is None else state
    # The largest of some rows has the same bits in any order: without -0.
    largest = torch.where(state.row_sum.isnan(), state.row_sum, state.row_max * walk.scale + 0.0)
    if walk.learnable_sink is not None:
        # As a split before the first one, that holds the sink of a head alone.
        sinks = walk.learnable_sink[tile.heads].to(walk.dtype).reshape(1, -1, q.shape[2], 1, 1)
        row_max = (sinks / walk.scale).expand_as(state.row_max)
        sink = State(row_max, (row_max != -INF).to(walk.dtype), empty.acc)
        state = merge_state(state, sink, walk.scale_log2, walk.formats)
    out, lse = normalise(state, walk.scale, walk.formats, walk.keep_scale)
    return out, lse, largest.squeeze(-1)


def _block(tile: Tile, state: State, q: torch.Tensor, keys: range) -> State:
    walk, formats = tile.walk, tile.walk.formats
    scores, _, _ = tile.scores(q, keys)
    hidden = tile.hidden(keys)
    if hidden is not None:
        scores.masked_fill_(hidden, -INF)
    row_max = torch.maximum(state.row_max, fold(scores, walk.block_n, torch.maximum, -INF))
    row_max = round_to(row_max, formats.row_max)
    rescale = rescale_factor(state.row_max, row_max, walk.scale_log2, formats)

    # Without a visible key, the subtraction below would be -inf - -inf.
    scaled_max = torch.where(row_max == -INF, 0.0, row_max * walk.scale_log2)
    scores.mul_(walk.scale_log2).sub_(scaled_max)
    if hidden is not None:
        # Again, because -inf times a scale <= 0 is not -inf.
        scores.masked_fill_(hidden, -INF)
    probs = ieee.exp2(scores)
    row_sum = state.row_sum * rescale + fold(probs, walk.block_n, torch.add, 0.0)

    # row_sum above includes the weights that are dropped here.
    probs = round_to(probs, formats.probs)
    kept = tile.kept(keys)
    if kept is not None:
        probs.masked_fill_(~kept, 0.0)
    acc = state.acc * rescale
    v = copy(tile.v[:, keys.start : keys.stop].permute(0, 2, 1, 3), walk.dtype)
    add_products(acc, probs, v[:, :, None])
    return State(row_max, round_to(row_sum, formats.row_sum), round_to(acc, formats.acc))
