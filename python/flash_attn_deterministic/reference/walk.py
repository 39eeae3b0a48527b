"""What all rows of a call share: its settings, which keys a row sees, and sums in one order."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from ..checks.numbers import KEYS_PER_BLOCK, check_multiple
from ..errors import ArgumentError, DtypeError
from .dropout import keep_probability
from .formats import DEFAULT_FORMATS, Formats

if TYPE_CHECKING:
    from typing_extensions import Unpack


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

    dtype: torch.dtype  # that is computed in
    softmax_scale: float
    window: Window
    formats: Formats
    block_n: int = KEYS_PER_BLOCK
    split_size: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None
    learnable_sink: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.dropout_p != 0 and self.rng_state is None:
            raise ArgumentError(
                f"rng_state: expected seed and offset with dropout_p {self.dropout_p}, got None"
            )
        if self.block_n < 1 or self.block_n & (self.block_n - 1):
            raise ArgumentError(f"block_n: expected a power of two, got {self.block_n}")
        check_multiple(self.split_size, self.block_n)

    @classmethod
    def of(cls, q: torch.Tensor, **options: Unpack[Options]) -> Walk:
        """Fills in the defaults that follow from q's head_dim and dtype."""
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise DtypeError(f"q: expected a floating-point dtype of 16 to 64 bits, got {q.dtype}")
        given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
        given.setdefault("softmax_scale", q.shape[-1] ** -0.5)
        given["window"] = Window.of(given.pop("causal", False), given.get("window", (-1, -1)))
        given["formats"] = given.get("formats", DEFAULT_FORMATS).filled(q.dtype)
        return cls(torch.float64 if q.dtype == torch.float64 else torch.float32, **given)

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
        return self._rounded(1.0 / keep_probability(self.dropout_p)) if self.dropout_p else None


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
