"""Which number format each step of an attention has, and the named choices of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from ..errors import ArgumentError
from ..reference import Formats
from .formats import NumberFormat, parse_format

Round = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Steps:
    """The format of each intermediate result; None: that of the computation.

    Args:
        scores: S = scale * q k^T of a block.
        probs: P = exp(S - m) on its way into P V.
        row_max: m, the maximum so far.
        row_sum: l, the sum of P of a block, and so far.
        rescale: the factors exp(m_before - m_after).
        acc: the product P V of a block.
        state: O, after each block.
        out: the output.
    """

    scores: NumberFormat | None = None
    probs: NumberFormat | None = None
    row_max: NumberFormat | None = None
    row_sum: NumberFormat | None = None
    rescale: NumberFormat | None = None
    acc: NumberFormat | None = None
    state: NumberFormat | None = None
    out: NumberFormat | None = None

    @classmethod
    def all(cls, number_format: NumberFormat) -> Steps:
        return cls(**dict.fromkeys(STEP_NAMES, number_format))

    @classmethod
    def parse(cls, formats: dict[str, str]) -> Steps:
        """Reads {step: format name}.

        Raises:
            ArgumentError: an unknown step or format.
        """
        unknown = sorted(set(formats) - set(STEP_NAMES))
        if unknown:
            raise ArgumentError(
                f"steps: expected names of {', '.join(STEP_NAMES)}, got {', '.join(unknown)}"
            )
        return cls(**{name: parse_format(value) for name, value in formats.items()})

    def formats(self) -> dict[str, NumberFormat]:
        named = {name: getattr(self, name) for name in STEP_NAMES}
        return {name: value for name, value in named.items() if value is not None}

    def without(self, step: str) -> Steps:
        return replace(self, **{step: None})

    def reference_formats(self, generator: torch.Generator | None) -> Formats:
        """The same for `flash_attn_deterministic.reference`.

        There, P V is added into O one key at a time in the computing format: acc and state are one
        step, which rounds where either is given.
        """
        named = {name: rounder(value, generator) for name, value in self.formats().items()}
        acc = named.pop("state", None) or named.get("acc")
        return Formats(**{**named, "acc": acc})


STEP_NAMES = tuple(field.name for field in fields(Steps))


def rounder(number_format: NumberFormat | None, generator: torch.Generator | None) -> Round:
    """Returns what rounds a step; the identity for None."""
    if number_format is None:
        return _same
    return lambda values: number_format.round(values, generator)


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class Preset:
    """A way to compute attention.

    Args:
        name: how it is asked for.
        algorithm: "renormalised": FlashAttention's algorithm 1, O divided by l after each block;
            "running": the kernels' order of operations, by `flash_attn_deterministic.reference`.
        rounded: the steps that are in the format; the others are in the container.
        split_size: tokens per split of the deterministic tree; 0: one.
    """

    name: str
    algorithm: str
    rounded: tuple[str, ...]
    split_size: int = 0

    def steps(self, number_format: NumberFormat) -> Steps:
        return Steps(**dict.fromkeys(self.rounded, number_format))


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("paper", "renormalised", STEP_NAMES),
        Preset("kernel", "running", ("probs", "out")),
        Preset("tree", "running", ("probs", "out"), split_size=256),
    )
}


def find_preset(name: str) -> Preset:
    """Returns a preset.

    Raises:
        ArgumentError: there is none of this name.
    """
    if name not in PRESETS:
        raise ArgumentError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
