"""The shapes that forward and backward are timed at, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flash_attn_deterministic.verify.speed.measure import summary, within

from tests.benchmarks.baseline import Scores
from tests.benchmarks.common import geometric_mean
from tests.benchmarks.lengths import ragged

# Upstream has kernels for each of them alone. A window has no causal mask besides.
FEATURES: Mapping[str, dict[str, Any]] = {
    "": {},
    "window": {"window_size": (1024, 0)},
    "softcap": {"softcap": 30.0},
    "alibi": {},
    "dropout": {"dropout_p": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A self-attention shape; lengths are those of packed sequences, empty for dense ones."""

    batch: int
    seqlen: int  # packed: the longest
    nheads: int
    nheads_k: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    lengths: tuple[int, ...] = ()
    feature: str = ""

    @property
    def name(self) -> str:
        """Returns e.g. "B8 L4096 H32/8 D128 causal softcap bf16"."""
        length = f"L{min(self.lengths)}..{self.seqlen}" if self.lengths else f"L{self.seqlen}"
        heads = f"H{self.nheads}"
        if self.nheads != self.nheads_k:
            heads += f"/{self.nheads_k}"
        words = [f"B{self.batch} {length} {heads} D{self.head_dim}"]
        words += ["causal"] * self.causal + [self.feature] * bool(self.feature) + [self.dtype]
        return " ".join(words)

    @property
    def window(self) -> tuple[int, int]:
        """Returns the keys visible to the left and right of the diagonal; negative: all."""
        window: tuple[int, int] = FEATURES[self.feature].get("window_size", (-1, -1))
        return (window[0], 0) if self.causal else window

    @property
    def forward_flops(self) -> int:
        """Returns the floating-point operations of both matrix products on visible keys."""
        left, right = self.window
        pairs = 0
        for length in self.lengths or [self.seqlen] * self.batch:
            before = length - 1 if left < 0 else min(left, length - 1)
            after = length - 1 if right < 0 else min(right, length - 1)
            # Rows see themselves, and as many keys on a side as there are, up to the limit.
            pairs += length + _seen(length, before) + _seen(length, after)
        return 4 * self.nheads * self.head_dim * pairs

    @property
    def backward_flops(self) -> int:
        """Returns the floating-point operations of the five matrix products on visible keys."""
        return self.forward_flops * 5 // 2

    def scores(self) -> Scores:
        """Returns the feature as upstream's kernels take it, tensors drawn."""
        slopes = state = None
        options = FEATURES[self.feature]
        if self.feature == "alibi":
            slopes = 2.0 ** -torch.linspace(1, 8, self.nheads, device="cuda")
        if self.feature == "dropout":
            state = torch.tensor([1, 0], device="cuda")
        return Scores(
            window=options.get("window_size", (-1, -1)),
            softcap=options.get("softcap", 0.0),
            dropout_p=options.get("dropout_p", 0.0),
            alibi_slopes=slopes,
            rng_state=state,
        )


def _seen(length: int, limit: int) -> int:
    """Returns the sum over all rows of the keys on one side of them, at most `limit` each."""
    return limit * (limit + 1) // 2 + (length - 1 - limit) * limit


_MASKS = (False, True)
# batch, seqlen, nheads, nheads_k, head_dim
_EACH_HEAD_DIM = (
    (4, 4096, 32, 32, 32),
    (8, 4096, 32, 32, 64),
    (4, 4096, 16, 16, 96),
    (8, 4096, 32, 32, 128),
    (4, 4096, 16, 16, 192),
    (4, 4096, 16, 16, 256),
)
_OTHERS = (
    (4, 2048, 32, 32, 64),
    (2, 16_384, 16, 16, 128),
    (8, 4096, 32, 8, 128),
    (8, 4096, 32, 1, 128),
)
_SHORT = ((256, 128), (64, 512), (32, 1024))
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_FEATURE_SHAPES = ((4, 4096, 32, 32, 64), (4, 4096, 32, 8, 128))
_WINDOW_SHAPES = ((2, 16_384, 32, 32, 64), (2, 16_384, 32, 8, 128))

DENSE = (
    *(Case(*shape, causal) for shape in _EACH_HEAD_DIM for causal in _MASKS),
    *(Case(*shape, True) for shape in _OTHERS),
    *(
        Case(batch, seqlen, 16, 16, head_dim, causal)
        for head_dim in _HEAD_DIMS
        for batch, seqlen in _SHORT
        for causal in (_MASKS if head_dim in (64, 128) else (True,))
    ),
    Case(64, 512, 32, 8, 128, True),
    *(
        Case(*shape, feature != "window", feature=feature)
        for feature in FEATURES
        if feature
        for shape in _FEATURE_SHAPES
    ),
    *(Case(*shape, False, feature="window") for shape in _WINDOW_SHAPES),
    *(Case(8, 4096, 32, 32, head_dim, True, "fp16") for head_dim in (64, 128)),
)
RAGGED = ragged(16, 256, 8192)
PACKED = tuple(Case(16, max(RAGGED), 16, 16, 128, mask, lengths=RAGGED) for mask in _MASKS)


def timed(
    sides: Mapping[str, Callable[[], object]], budget_ms: float, most: int
) -> dict[str, dict[str, float]]:
    """Times calls in turns, as often as a budget of GPU time allows.

    Args:
        sides: a call by name.
        budget_ms: milliseconds for all calls of all sides together.
        most: repetitions at most; at least 5 are made.

    Returns:
        Median, 10th and 90th percentile of the milliseconds, by name.
    """
    found = within(sides, budget_ms, most)
    return {name: {**summary(ms), "repeats": len(ms)} for name, ms in found.items()}


def means(cases: Iterable[Mapping[str, Any]], others: Iterable[str]) -> dict[str, Any]:
    """Returns geometric mean and worst of the ratios to other sides.

    Args:
        cases: results.
        others: the sides; a result has ratio_to_SIDE, or not.

    Returns:
        By side, then "all" and each head dim (of cases without a feature) and each feature:
        "mean", "worst" and the number of "cases".
    """
    found: dict[str, Any] = {}
    for other in others:
        groups: dict[str, list[float]] = {}
        for case in cases:
            ratio = case.get(f"ratio_to_{other}")
            if ratio is not None:
                keys = [case["feature"]] if case["feature"] else ["all", f"D{case['head_dim']}"]
                for key in keys:
                    groups.setdefault(key, []).append(ratio)
        if groups:
            found[other] = {
                key: {
                    "mean": round(geometric_mean(ratios), 4),
                    "worst": max(ratios),
                    "cases": len(ratios),
                }
                for key, ratios in groups.items()
            }
    return found
