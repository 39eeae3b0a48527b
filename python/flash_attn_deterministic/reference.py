"""The kernels' reduction tree in plain torch: the CPU backend and the oracle of the tests.

Keys are cut into splits of split_size tokens, counted from the sequence's own position 0, and a
split into blocks of block_n. Blocks are visited last to first with FlashAttention-2's online
softmax; the un-normalised states of the splits are merged last to first; one division ends it.

A row's bits depend on that row's inputs and on nothing else. So every step is an elementwise IEEE
operation, whose result cannot depend on vector width, tails or threads: no matmul (BLAS picks its
order of summation by shape) and no torch.sum, but one multiplication and one addition per index of
the contraction, in rising order. That makes it slow: 2 * 10^9 multiply-adds per second.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from . import _ieee
from ._build_info import build_info
from .errors import ArgumentError, DtypeError

Rounding = torch.dtype | Callable[[torch.Tensor], torch.Tensor] | None

# Elements of the largest tensor of a step. Up to here it stays in the L2 cache, and torch runs an
# operation on the calling thread: its thread pool gains little on such steps, and on a machine
# that has other work its barriers can make them a hundred times slower.
_TILE_ELEMENTS = 32 * 1024
_MAX_TILE_ROWS = 128
_INF = float("inf")


@dataclass(frozen=True)
class Formats:
    """The number format of each intermediate result.

    A dtype rounds to it and back, a callable maps a tensor to the rounded tensor, None keeps the
    computing dtype (float64 for float64 inputs, otherwise float32).

    Args:
        scores: S = q k^T, once per block.
        probs: P on its way into P v; None is the input dtype, as in the kernels.
        row_max: the running maximum.
        row_sum: the running sum, after each block.
        rescale: the factor for row_sum and acc when the maximum moves.
        acc: the accumulator of P v, after each block.
        out: the normalised output, before it goes to the input dtype.
    """

    scores: Rounding = None
    probs: Rounding = None
    row_max: Rounding = None
    row_sum: Rounding = None
    rescale: Rounding = None
    acc: Rounding = None
    out: Rounding = None


DEFAULT_FORMATS = Formats()


class State(NamedTuple):
    """What is known of some rows after some keys, not normalised.

    Args:
        row_max: (..., rows, 1), -inf before the first visible key.
        row_sum: (..., rows, 1), 0 before the first visible key.
        acc: (..., rows, head_dim).
    """

    row_max: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor


def merge_state(
    running: State, part: State, scale_log2: float, formats: Formats = DEFAULT_FORMATS
) -> State:
    """Merges the state of one more split into the running one.

    Args:
        running: state of the later splits.
        part: state of the split before them; same shapes.
        scale_log2: softmax scale times log2(e).
        formats: number format of each step.

    Returns:
        The merged state. A row that is empty (row_sum 0) on one side is the other side's,
        unchanged; a NaN sum is not empty.
    """
    row_max = _round(torch.maximum(running.row_max, part.row_max), formats.row_max)
    scale_running = _rescale_factor(running.row_max, row_max, scale_log2, formats)
    scale_part = _rescale_factor(part.row_max, row_max, scale_log2, formats)
    merged = State(
        row_max,
        _round(running.row_sum * scale_running + part.row_sum * scale_part, formats.row_sum),
        _round(running.acc * scale_running + part.acc * scale_part, formats.acc),
    )
    running_empty = running.row_sum == 0
    part_empty = part.row_sum == 0
    return State(
        *(
            torch.where(part_empty, r, torch.where(running_empty, p, m))
            for r, p, m in zip(running, part, merged, strict=True)
        )
    )


@torch.no_grad()
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    split_size: int = 0,
    block_n: int | None = None,
    formats: Formats = DEFAULT_FORMATS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention in the kernels' order of operations.

    Args:
        q: (batch, seqlen_q, nheads, head_dim); float16, bfloat16, float32 or float64.
        k: (batch, seqlen_k, nheads_k, head_dim), like q; nheads is a multiple of nheads_k.
        v: like k.
        softmax_scale: factor of q k^T; None: head_dim ** -0.5.
        causal: key j is visible to query i where j <= i + seqlen_k - seqlen_q; otherwise all are.
        split_size: tokens per split, a multiple of block_n; 0: one split.
        block_n: keys per block, a power of two; None: that of the kernel for this head_dim.
        formats: number format of each step.

    Returns:
        out (batch, seqlen_q, nheads, head_dim) in q's dtype, and softmax_lse (batch, nheads,
        seqlen_q) in float32 (float64 for float64 inputs). Rows without a visible key: out 0,
        softmax_lse +inf.

    Raises:
        DtypeError: q has another dtype.
        ArgumentError: split_size or block_n is not as above.
    """
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise DtypeError(f"q: expected a floating-point dtype of 16 to 64 bits, got {q.dtype}")
    head_dim = q.shape[3]
    walk = _Walk(
        scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        split_size=split_size,
        block_n=build_info().tile(head_dim).block_n if block_n is None else block_n,
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        formats=replace(formats, probs=q.dtype) if formats.probs is None else formats,
    )
    group = q.shape[2] // k.shape[2]
    q_groups = q.reshape(*q.shape[:2], k.shape[2], group, head_dim)
    out = q.new_empty(q.shape)
    softmax_lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=walk.dtype)
    for batch, heads_k, rows in _tiles(q.shape, k.shape[2], walk.block_n):
        heads = slice(heads_k.start * group, heads_k.stop * group)
        out_tile, lse_tile = walk.rows(
            # (batch, nheads_k, group, rows, head_dim): a group shares its keys.
            q_groups[batch, rows, heads_k].permute(0, 2, 3, 1, 4),
            k[batch, :, heads_k],
            v[batch, :, heads_k],
            last_key=rows.start + k.shape[1] - q.shape[1],
        )
        out[batch, rows, heads] = out_tile.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        softmax_lse[batch, heads, rows] = lse_tile.flatten(1, 2)
    return out, softmax_lse


@dataclass(frozen=True)
class _Walk:
    """How rows go over their keys; the same for all tiles of a call."""

    scale: float
    causal: bool
    split_size: int
    block_n: int
    dtype: torch.dtype
    formats: Formats

    def __post_init__(self) -> None:
        if self.block_n < 1 or self.block_n & (self.block_n - 1):
            raise ArgumentError(f"block_n: expected a power of two, got {self.block_n}")
        if self.split_size < 0 or self.split_size % self.block_n:
            raise ArgumentError(
                f"split_size: expected 0 or a multiple of block_n ({self.block_n}), "
                f"got {self.split_size}"
            )

    @functools.cached_property
    def rounded_scale(self) -> float:
        return float(torch.tensor(self.scale, dtype=self.dtype))

    @functools.cached_property
    def scale_log2(self) -> float:
        product = self.rounded_scale * math.log2(math.e)
        return float(torch.tensor(product, dtype=self.dtype))

    def rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last_key: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one tile of rows over all of its keys.

        Args:
            q: (batch, nheads_k, group, rows, head_dim).
            k: (batch, seqlen_k, nheads_k, head_dim).
            v: like k.
            last_key: position of the last key that the first row sees, if causal.

        Returns:
            out like q, and lse without q's last dimension, in the computing dtype.
        """
        q = q.to(self.dtype, memory_format=torch.contiguous_format)
        visible = min(k.shape[1], last_key + q.shape[3]) if self.causal else k.shape[1]
        split_size = self.split_size or max(visible, 1)
        state: State | None = None
        for begin in reversed(range(0, visible, split_size)):
            part = self._split(q, k, v, begin, min(begin + split_size, visible), last_key)
            state = (
                part if state is None else merge_state(state, part, self.scale_log2, self.formats)
            )
        return self._normalise(self._empty_state(q) if state is None else state)

    def _empty_state(self, q: torch.Tensor) -> State:
        column = (*q.shape[:-1], 1)
        return State(q.new_full(column, -_INF), q.new_zeros(column), torch.zeros_like(q))

    def _split(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        begin: int,
        end: int,
        last_key: int,
    ) -> State:
        state = self._empty_state(q)
        for start in reversed(range(begin, end, self.block_n)):
            keys = slice(start, min(start + self.block_n, end))
            mask = self._mask(q, keys, last_key)
            state = self._block(state, q, k[:, keys], v[:, keys], mask)
        return state

    def _mask(self, q: torch.Tensor, keys: slice, last_key: int) -> torch.Tensor | None:
        if not self.causal or keys.stop <= last_key + 1:
            return None
        row = torch.arange(q.shape[3], device=q.device)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        return key > row[:, None] + last_key

    def _block(
        self,
        state: State,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> State:
        formats = self.formats
        # (batch, nheads_k, head_dim, keys) and (batch, nheads_k, keys, head_dim).
        k = _copy(k.permute(0, 2, 3, 1), self.dtype)
        v = _copy(v.permute(0, 2, 1, 3), self.dtype)
        scores = q.new_zeros(q.shape[:-1] + k.shape[-1:])
        _add_products(scores, q, k)
        scores = _round(scores, formats.scores)
        if mask is not None:
            scores.masked_fill_(mask, -_INF)
        row_max = torch.maximum(state.row_max, _fold(scores, self.block_n, torch.maximum, -_INF))
        row_max = _round(row_max, formats.row_max)
        rescale = _rescale_factor(state.row_max, row_max, self.scale_log2, formats)

        # Without a visible key, the subtraction below would be -inf - -inf.
        scaled_max = torch.where(row_max == -_INF, 0.0, row_max * self.scale_log2)
        scores.mul_(self.scale_log2).sub_(scaled_max)
        if mask is not None:
            # Again, because -inf times a scale of 0 or less is not -inf.
            scores.masked_fill_(mask, -_INF)
        probs = _ieee.exp2(scores)
        row_sum = state.row_sum * rescale + _fold(probs, self.block_n, torch.add, 0.0)

        acc = state.acc * rescale
        _add_products(acc, _round(probs, formats.probs), v)
        return State(row_max, _round(row_sum, formats.row_sum), _round(acc, formats.acc))

    def _normalise(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        empty = state.row_sum == 0
        out = torch.where(empty, 0.0, _round(state.acc / state.row_sum, self.formats.out))
        lse = state.row_max * self.rounded_scale + _ieee.log(state.row_sum)
        return out, torch.where(empty, _INF, lse).squeeze(-1)


def _tiles(
    q_shape: torch.Size, nheads_k: int, block_n: int
) -> Iterator[tuple[slice, slice, slice]]:
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


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to a contiguous tensor, one head at a time to stay off the thread pool."""
    copy = tensor.new_empty(tensor.shape, dtype=dtype)
    for index in itertools.product(*map(range, tensor.shape[:2])):
        copy[index].copy_(tensor[index])
    return copy


def _add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, adding the products one by one in the order of the contraction.

    Args:
        total: (batch, nheads_k, group, rows, columns).
        left: (batch, nheads_k, group, rows, n).
        right: (batch, nheads_k, n, columns).
    """
    product = torch.empty_like(total)
    right = right[:, :, None, None]
    for index in range(left.shape[-1]):
        torch.mul(left[..., index, None], right[..., index, :], out=product)
        total.add_(product)


def _fold(
    values: torch.Tensor,
    length: int,
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    neutral: float,
) -> torch.Tensor:
    """Reduces the last dimension by halving it, padded to `length` (a power of two)."""
    values = torch.nn.functional.pad(values, (0, length - values.shape[-1]), value=neutral)
    while length > 1:
        length //= 2
        values = operation(values[..., :length], values[..., length:])
    return values


def _rescale_factor(
    before: torch.Tensor, after: torch.Tensor, scale_log2: float, formats: Formats
) -> torch.Tensor:
    factor = _ieee.exp2((before - after) * scale_log2)
    # Nothing was summed yet: -inf - -inf, or -inf times a scale of 0 or less, must not matter.
    factor = torch.where(before == -_INF, 0.0, factor)
    return _round(factor, formats.rescale)


def _round(values: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    if rounding is None or rounding is values.dtype:
        return values
    if isinstance(rounding, torch.dtype):
        return values.to(rounding).to(values.dtype)
    return rounding(values)
