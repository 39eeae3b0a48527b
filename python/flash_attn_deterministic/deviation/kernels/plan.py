"""What the study of real kernels runs on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ArgumentError
from ..attentions.masks import Call
from ..attentions.registry import Attention, usable
from ..forward.inputs import DISTRIBUTIONS, draw
from ..numbers.formats import parse_format
from ..study.environment import check_device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMPARED = ("ours", "ours-atomics", "ours+residual", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient",
            "sdpa-math", "explicit")  # fmt: skip
_HEADS = 2


@dataclass(frozen=True)
class KernelPlan:
    """What to run: on which device, thinned or not, with how many draws per point."""

    device: str = "cuda"
    quick: bool = False
    seeds: int = 4

    def check(self) -> None:
        """Raises ArgumentError for no draws, or a device that is not there."""
        if self.seeds < 1:
            raise ArgumentError(f"seeds: expected at least 1, got {self.seeds}")
        check_device(self.device)

    @property
    def small(self) -> bool:
        return self.quick or self.device == "cpu"

    @property
    def seqlens(self) -> tuple[int, ...]:
        return (64, 128, 256) if self.small else (256, 512, 1024, 2048, 4096, 8192)

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (64,) if self.small else (64, 128)

    def inputs_of(self, name: str, head_dim: int) -> tuple[str, ...]:
        """All distributions for bfloat16 at the first head_dim, two for the rest."""
        whole = name == "bf16" and head_dim == self.head_dims[0] and not self.small
        return DISTRIBUTIONS if whole else ("uniform", "normal")

    def points(self, seqlens: Sequence[int]) -> Iterator[tuple[dict[str, Any], Call]]:
        """Yields formats, head dimensions, inputs and lengths, with tensors of each."""
        for name in DTYPES:
            for head_dim in self.head_dims:
                for inputs in self.inputs_of(name, head_dim):
                    for seqlen in seqlens:
                        where = {"format": name, "inputs": inputs, "seqlen": seqlen}
                        call = self.call(inputs, seqlen, head_dim, name)
                        yield {**where, "head_dim": head_dim}, call

    def attentions(
        self, dtype: torch.dtype, head_dim: int, backward: bool = False
    ) -> dict[str, Attention]:
        return _usable(self.device, dtype, head_dim, backward)

    def call(self, inputs: str, seqlen: int, head_dim: int, name: str) -> Call:
        """Draws q, k and v (seeds, heads, seqlen, head_dim), rounded once to the format."""
        drawn = [draw(inputs, seed, seqlen * _HEADS, head_dim) for seed in range(self.seeds)]
        shape = (self.seeds, _HEADS, seqlen, head_dim)
        q, k, v = (
            parse_format(name).round(torch.stack(part)).view(shape).to(self.device, DTYPES[name])
            for part in zip(*drawn, strict=True)
        )
        return Call(q, k, v)


@functools.lru_cache
def _usable(device: str, dtype: torch.dtype, head_dim: int, backward: bool) -> dict[str, Attention]:
    return usable(COMPARED, device, dtype, head_dim, backward)[0]


def drawn_dout(like: torch.Tensor) -> torch.Tensor:
    """Returns dO, N(0, 1), the same on every machine."""
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(99))
    return values.to(like.device, like.dtype)
