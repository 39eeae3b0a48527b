"""The walk of rows over their keys: blocks and splits, last to first."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch

from ..build_info import build_info
from ..checks.numbers import check_multiple
from ..errors import ArgumentError, DtypeError
from . import ieee
from .dropout import Dropout, Place
from .formats import DEFAULT_FORMATS, Formats, round_to
from .state import INF, State, empty_state, merge_state, normalise, rescale_factor


@dataclass(frozen=True)
class Window:
    """Keys from `left` before to `right` after the row's own position; -1: no limit."""

    left: int
    right: int

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int]) -> Window:
        """Makes a window of the arguments, without lengths, so that bits don't depend on these."""
        left, right = window
        return cls(max(left, -1), 0 if causal else max(right, -1))

    @property
    def is_local(self) -> bool:
        """Whether the rows of a sequence see different keys, as with causal."""
        return self.left >= 0 or self.right >= 0

    def visible(self, rows: range, seqlen_k: int) -> tuple[int, int]:
        """Returns the keys [begin, end) that some row sees; begin >= end if there is none."""
        begin = max(0, rows[0] - self.left) if self.left >= 0 else 0
        end = min(seqlen_k, rows[-1] + self.right + 1) if self.right >= 0 else seqlen_k
        return begin, end

    def hidden(
        self, rows: range, keys: range, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Returns (rows, keys), True where the row does not see the key; None if none is hidden."""
        beyond = self.right >= 0 and keys[-1] > rows[0] + self.right
        before = self.left >= 0 and keys[0] < rows[-1] - self.left
        if not (beyond or before):
            return None
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        mask = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=device)
        if beyond:
            mask |= key > row + self.right
        if before:
            mask |= key < row - self.left
        return mask


class Options(TypedDict, total=False):
    """The arguments of the reference's functions besides tensors; see `attention`."""

    softmax_scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    dropout_p: float
    rng_state: torch.Tensor | None
    split_size: int
    block_n: int | None
    formats: Formats
    learnable_sink: torch.Tensor | None


@dataclass(frozen=True)
class Walk:
    """The settings that all rows of a call share."""

    softmax_scale: float
    window: Window
    softcap: float
    split_size: int
    block_n: int
    dtype: torch.dtype
    formats: Formats
    dropout: Dropout | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.block_n < 1 or self.block_n & (self.block_n - 1):
            raise ArgumentError(f"block_n: expected a power of two, got {self.block_n}")
        check_multiple(self.split_size, self.block_n)

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        rng_state: torch.Tensor | None = None,
        split_size: int = 0,
        block_n: int | None = None,
        formats: Formats = DEFAULT_FORMATS,
        learnable_sink: torch.Tensor | None = None,
    ) -> Walk:
        """Fills in the defaults that follow from q's head_dim and dtype."""
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise DtypeError(f"q: expected a floating-point dtype of 16 to 64 bits, got {q.dtype}")
        head_dim = q.shape[-1]
        return cls(
            softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
            window=Window.of(causal, window),
            softcap=softcap,
            split_size=split_size,
            block_n=build_info().tile(head_dim).block_n if block_n is None else block_n,
            dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
            formats=formats.filled(q.dtype),
            dropout=Dropout.of(dropout_p, rng_state),
            sinks=learnable_sink,
        )

    def _rounded(self, value: float) -> float:
        return float(torch.tensor(value, dtype=self.dtype, device="cpu"))

    @functools.cached_property
    def scale(self) -> float:
        """The factor of the scores in the exponent; with softcap, of tanh's value."""
        return self._rounded(self.softcap if self.softcap > 0 else self.softmax_scale)

    @functools.cached_property
    def scale_log2(self) -> float:
        return self._rounded(self.scale * math.log2(math.e))

    @functools.cached_property
    def tanh_scale(self) -> float:
        return self._rounded(self._rounded(self.softmax_scale) / self.scale)

    @functools.cached_property
    def score_scale(self) -> float:
        """The factor of q k^T."""
        return self._rounded(self.softmax_scale)

    @functools.cached_property
    def keep_scale(self) -> float | None:
        """The factor of the weights that dropout keeps; None without dropout."""
        return None if self.dropout is None else self._rounded(self.dropout.keep_scale)

    def bias_slopes(self, slopes: torch.Tensor) -> torch.Tensor:
        """Returns ALiBi slopes (..., 1, 1) for scores that are scaled later."""
        return (slopes.to(self.dtype) / self.scale)[..., None, None]

    def rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        position: int,
        place: Place,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one tile of rows over all of its keys; returns out like q, and lse, not rounded.

        q is (batch, nheads_k, group, rows, head_dim), k and v (batch, seqlen_k, nheads_k,
        head_dim), slopes (batch, nheads_k, group); `position` is the first row's own among the
        keys.
        """
        q = q.to(self.dtype, memory_format=torch.contiguous_format)
        if slopes is not None:
            slopes = self.bias_slopes(slopes)
        rows = range(position, position + q.shape[3])
        begin, end = self.window.visible(rows, k.shape[1])
        state: State | None = None
        split_size = self.split_size or max(end, 1)
        for split in reversed(range(begin // split_size, -(-end // split_size))):
            part = empty_state(q)
            first = max(split * split_size, begin // self.block_n * self.block_n)
            last = min((split + 1) * split_size, end)
            for start in reversed(range(first, last, self.block_n)):
                keys = range(start, min(start + self.block_n, last))
                part = self._block(part, q, k, v, slopes, rows, keys, place)
            state = (
                part if state is None else merge_state(state, part, self.scale_log2, self.formats)
            )
        state = empty_state(q) if state is None else state
        if self.sinks is not None:
            state = merge_state(state, self._sink(q, place), self.scale_log2, self.formats)
        return normalise(state, self.scale, self.formats, self.keep_scale)

    def _sink(self, q: torch.Tensor, place: Place) -> State:
        """Returns the state of a split before the first one, that holds a head's sink alone."""
        assert self.sinks is not None
        group = q.shape[2]
        heads = slice(place.heads_k.start * group, place.heads_k.stop * group)
        sinks = self.sinks[heads].to(self.dtype).reshape(1, -1, group, 1, 1)
        state = empty_state(q)
        row_max = (sinks / self.scale).expand_as(state.row_max)
        return state._replace(row_max=row_max, row_sum=(row_max != -INF).to(self.dtype))

    def _block(
        self,
        state: State,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        rows: range,
        keys: range,
        place: Place,
    ) -> State:
        formats = self.formats
        # (batch, nheads_k, head_dim, keys) and (batch, nheads_k, keys, head_dim).
        k = copy(k[:, keys.start : keys.stop].permute(0, 2, 3, 1), self.dtype)
        v = copy(v[:, keys.start : keys.stop].permute(0, 2, 1, 3), self.dtype)
        scores, _ = self.scores(q, k, slopes, rows, keys)
        hidden = self.window.hidden(rows, keys, q.device)
        if hidden is not None:
            scores.masked_fill_(hidden, -INF)
        row_max = torch.maximum(state.row_max, fold(scores, self.block_n, torch.maximum, -INF))
        row_max = round_to(row_max, formats.row_max)
        rescale = rescale_factor(state.row_max, row_max, self.scale_log2, formats)

        # Without a visible key, the subtraction below would be -inf - -inf.
        scaled_max = torch.where(row_max == -INF, 0.0, row_max * self.scale_log2)
        scores.mul_(self.scale_log2).sub_(scaled_max)
        if hidden is not None:
            # Again, because -inf times a scale <= 0 is not -inf.
            scores.masked_fill_(hidden, -INF)
        probs = ieee.exp2(scores)
        row_sum = state.row_sum * rescale + fold(probs, self.block_n, torch.add, 0.0)

        # row_sum above includes the weights that are dropped here.
        probs = round_to(probs, formats.probs)
        if self.dropout is not None:
            probs.masked_fill_(~self.dropout.keep(place, q.shape[2], rows, keys), 0.0)
        acc = state.acc * rescale
        add_products(acc, probs, v[:, :, None])
        return State(row_max, round_to(row_sum, formats.row_sum), round_to(acc, formats.acc))

    def scores(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        slopes: torch.Tensor | None,
        rows: range,
        keys: range,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns scores to be multiplied by `scale`, and with softcap the value of tanh.

        q is (batch, nheads_k, group, rows, head_dim), k (batch, nheads_k, head_dim, keys).
        """
        scores = q.new_zeros(q.shape[:-1] + k.shape[-1:])
        add_products(scores, q, k[:, :, None])
        scores = round_to(scores, self.formats.scores)
        capped = None
        if self.softcap > 0:
            scores = capped = ieee.tanh(scores * self.tanh_scale)
        if slopes is not None:
            row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=q.device)
            scores = scores - slopes * (row - key).abs().to(self.dtype)
        return scores, capped


def copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to a contiguous tensor, one head at a time, which avoids the thread pool."""
    copy = tensor.new_empty(tensor.shape, dtype=dtype)
    for index in itertools.product(*map(range, tensor.shape[:2])):
        copy[index].copy_(tensor[index])
    return copy


def add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, adding the products one by one in the order of the contraction."""
    product = torch.empty_like(total)
    for index in range(left.shape[-1]):
        torch.mul(left[..., index, None], right[..., index, None, :], out=product)
        total.add_(product)


def fold(
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
