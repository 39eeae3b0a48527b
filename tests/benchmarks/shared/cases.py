"""The shapes that forward and backward are timed at, and how often."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from flash_attn_deterministic.bench.problem import Shape
from flash_attn_deterministic.verify.speed.measure import summary, within
from flash_attn_deterministic.verify.speed.upstream import Scores

from tests.benchmarks.shared.run import Means, means

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
    def _shape(self) -> Shape:
        sizes = (self.batch, self.seqlen, self.nheads, self.nheads_k, self.head_dim)
        return Shape("forward", *sizes, self.causal, self.dtype, lengths=self.lengths)

    @property
    def name(self) -> str:
        """Returns e.g. "B8 L4096 H32/8 D128 causal softcap bf16"."""
        words = self._shape.name.split()[1:]
        return " ".join([*words[:-1], *[self.feature] * bool(self.feature), words[-1]])

    @property
    def window(self) -> tuple[int, int]:
        """Returns the keys visible to the left and right of the diagonal; negative: all."""
        window: tuple[int, int] = FEATURES[self.feature].get("window_size", (-1, -1))
        return (window[0], 0) if self.causal else window

    @property
    def forward_flops(self) -> int:
        """Returns the floating-point operations of both matrix products on visible keys."""
        left, right = self.window
        return replace(self._shape, causal=right == 0, window=left).flops

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


def ragged(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Draws the lengths of packed sequences, the same ones each time."""
    numbers = random.Random(0)
    return tuple(numbers.randint(shortest, longest) for _ in range(batch))


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


def timed_result(
    case: Case, flops: int, times: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Returns what the results of forward, backward and varlen begin with."""
    tflops = round(flops / times["ours"]["median"] / 1e9, 1)
    return {"name": case.name, **asdict(case), "ms": times, "tflops": tflops}


def means_to(results: Iterable[Mapping[str, Any]], *others: str) -> dict[str, Means]:
    """Returns "geometric_means" for a record: by other side, then by head dim or feature."""
    return {
        "geometric_means": means(
            (other, key, result["name"], result[f"ratio_to_{other}"])
            for other in others
            for result in results
            if f"ratio_to_{other}" in result
            for key in _groups(result)
        )
    }


def _groups(result: Mapping[str, Any]) -> list[str]:
    return [result["feature"]] if result["feature"] else ["all", f"D{result['head_dim']}"]
