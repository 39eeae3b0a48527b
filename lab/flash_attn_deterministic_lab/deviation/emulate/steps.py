"""Which number format each step of an attention has, and the named choices of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..numbers.formats import NumberFormat, parse_format

Steps = Mapping[str, NumberFormat]  # the format of a step's result; none: the computation's

STEP_NAMES = (
    "scores",  # S = scale * q k^T of a block
    "probs",  # P = exp(S - m) on its way into P V
    "row_max",  # m, of a block and so far
    "row_sum",  # l, the sum of P of a block, and so far
    "rescale",  # the factors exp(m_before - m_after)
    "sum_terms",  # l times its factor, both terms of the update of l
    "weight",  # l * factor as O's weight ("renormalised" only)
    "products",  # O and P V of a block, each times its weight
    "mixed",  # the sum of these two
    "acc",  # the product P V of a block
    "state",  # O, after each block
    "out",  # the output
)
# What tiling adds to a line of the algorithm: products with factors of the maximum, their sum, and
# the factors. One rounding per line leaves out what is within a line.
WITHIN_LINES = ("sum_terms", "weight", "products", "mixed")
TILING = "+".join(("rescale", *WITHIN_LINES))


@dataclass(frozen=True)
class Preset:
    """A way to compute attention."""

    name: str
    # "renormalised": FlashAttention's algorithm 1, O divided by l after each block, first to last;
    # "running": O is divided once, blocks last to first, as the kernels do.
    algorithm: str
    rounded: tuple[str, ...]  # steps that are in the format; the others are in the container
    split_size: int = 0  # tokens per split of the deterministic tree; 0: one
    threshold: float = 0.0  # powers of two by which a row's maximum has to grow to be raised
    cubic: bool = False  # whether 2^x of the fraction of x is a cubic polynomial
    probs: str = ""  # P's format in the place of the format under test, with P scaled
    probs_scale: float = 1.0  # by this before it is rounded

    def steps(self, number_format: NumberFormat) -> Steps:
        steps = dict.fromkeys(self.rounded, number_format)
        return steps | {"probs": parse_format(self.probs)} if self.probs else steps


_LINES = tuple(name for name in STEP_NAMES if name not in WITHIN_LINES)
_KERNEL = ("probs", "out")
PRESETS = {
    preset.name: preset
    for preset in (
        Preset("paper", "renormalised", STEP_NAMES),
        Preset("lines", "renormalised", _LINES),
        Preset("kernel", "running", _KERNEL),
        Preset("tree", "running", _KERNEL, split_size=256),
        Preset("fa4-steps", "running", _KERNEL, threshold=8.0, cubic=True),
        # P of at most 1 would waste half of E4M3's range: 2^8 times P ends at 256 of 448.
        Preset("fp8", "running", _KERNEL, probs="fp8_e4m3", probs_scale=256.0),
    )
}
