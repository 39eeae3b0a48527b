"""The cases of the row "ranks": calls, how they are cut, and over how many ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 30)},
    "window-causal": {"causal": True, "window_size": (70, -1)},
    "window-left": {"window_size": (110, -1)},
    "window-right": {"window_size": (-1, 40)},
    "softcap": {"causal": True, "softcap": 3.0},
}


@dataclass(frozen=True)
class Case:
    """One call on one device, and the same over ranks."""

    ranks: int  # over which tokens lie
    degree: int | None = None  # over which heads are divided; None: as the planner chooses
    order: str = "contiguous"  # "contiguous" or "zigzag"
    mask: str = "causal"  # a name in MASKS
    heads_k: int | None = None  # KV heads at a time; None: as the planner chooses
    # of each sequence, in all; equal ones are a dense call unless packed
    lengths_q: tuple[int, ...] = (128,)
    lengths_k: tuple[int, ...] = (128,)  # likewise
    packed: bool = False  # whether the call is packed
    nheads: int = 6  # query heads
    nheads_k: int = 2  # KV heads
    head_dim: int = 32  # of q, k and v
    dtype: str = "bf16"  # "bf16" or "fp16"
    split_size: int = 64  # tokens per split

    @property
    def name(self) -> str:
        """Returns e.g. "p2-zigzag-causal-d32-bf16-q130-k130"."""
        words = [f"p{self.ranks}"]
        words += [f"u{self.degree}"] * (self.degree is not None)
        words += ["packed"] * self.packed
        words += [self.order, self.mask, f"d{self.head_dim}", self.dtype]
        words += [f"heads{self.nheads}over{self.nheads_k}"]
        for side, lengths in (("q", self.lengths_q), ("k", self.lengths_k)):
            words.append(side + "+".join(map(str, lengths)))
        return "-".join(words)

    @property
    def seed(self) -> int:
        """Returns the seed of its numbers."""
        return zlib.crc32(self.name.encode()) >> 1

    @property
    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of the call."""
        return {**MASKS[self.mask], "split_size": self.split_size}


@dataclass(frozen=True)
class Scale:
    """How large cases are."""

    # tokens of a rank, around a multiple of the blocks of rows and keys; even
    borders: tuple[int, ...]
    head_dims: tuple[tuple[int, str], ...]  # with dtypes
    masks: tuple[str, ...]  # names in MASKS
    batch: int  # sequences of a dense call
    split_size: int  # tokens per split
    packed: int  # the shortest packed sequence; others are multiples


_FEW = ("full", "causal", "window")
CPU_QUICK = Scale((64, 66), ((16, "bf16"),), _FEW, 1, 64, 12)
CPU = Scale((62, 64, 66), ((16, "bf16"), (40, "fp16")), tuple(MASKS), 2, 64, 12)
CUDA_QUICK = Scale(
    (1022, 1024, 1026), ((64, "bf16"), (128, "bf16"), (128, "fp16")), _FEW, 2, 512, 300
)
CUDA = Scale(
    (254, 256, 258, 1022, 1024, 1026, 4096),
    ((64, "bf16"), (64, "fp16"), (128, "bf16"), (128, "fp16"), (96, "bf16"), (256, "bf16")),
    tuple(MASKS),
    2,
    512,
    300,
)


def scale_of(device: str, quick: bool) -> Scale:
    """Returns the scale of a run."""
    if device == "cpu":
        return CPU_QUICK if quick else CPU
    return CUDA_QUICK if quick else CUDA


def counts_of(most: int) -> list[int]:
    """Returns the numbers of ranks to try: all up to 4, then powers of two, and the most."""
    powers = (2**n for n in range(most.bit_length()))
    return sorted({*range(1, min(most, 4) + 1), *powers, most})


def cases_of(
    ranks: int, scale: Scale, held: Callable[[tuple[int, str]], bool] = lambda _: True
) -> Iterator[Case]:
    """Yields the cases of a number of ranks, of head dims and dtypes that there are kernels for."""
    configs = tuple(filter(held, scale.head_dims))
    if not configs:
        return
    for (head_dim, dtype), mask, order in itertools.product(
        configs, scale.masks, ("contiguous", "zigzag")
    ):
        case = Case(ranks, None, order, mask)
        case = replace(case, head_dim=head_dim, dtype=dtype, split_size=scale.split_size)
        for border, degree in itertools.product(scale.borders, (None, 1)):
            yield _square(case, (border * ranks,) * scale.batch, degree=degree)
        # Fewer queries than keys: borders of both lie at other places.
        shorter = (scale.borders[0] // 2 // 2 * 2 * ranks,)
        longest = (scale.borders[-1] * ranks,)
        yield replace(case, lengths_q=shorter, lengths_k=longest)
        for degree in (None, 1):
            yield _square(case, _packed_lengths(case, scale.packed), packed=True, degree=degree)
        if order == "zigzag":
            yield _square(case, longest * scale.batch, nheads_k=case.nheads)
        if mask == "causal":  # a group of heads on each KV head, and one KV head for all
            for nheads, nheads_k in ((32, 8), (8, 1)):
                yield _square(case, longest * scale.batch, nheads=nheads, nheads_k=nheads_k)
    # Heads that are divided over all ranks, or over some.
    head_dim, dtype = configs[0]
    for degree in (degree for degree in range(2, ranks + 1) if ranks % degree == 0):
        for order, packed in itertools.product(("contiguous", "zigzag"), (False, True)):
            case = Case(ranks, degree, order, nheads=2 * degree, nheads_k=degree, packed=packed)
            case = replace(case, head_dim=head_dim, dtype=dtype, split_size=scale.split_size)
            whole = (scale.borders[0] // 2 * 2 * ranks,)
            yield _square(case, whole * (1 if packed else scale.batch))


def _square(case: Case, lengths: tuple[int, ...], **changes: Any) -> Case:
    """Returns the same with as many queries as keys."""
    return replace(case, lengths_q=lengths, lengths_k=lengths, **changes)


def _packed_lengths(case: Case, shortest: int) -> tuple[int, ...]:
    if case.order == "zigzag":
        return tuple(shortest // 2 * 2 * case.ranks * n for n in (1, 3, 2))
    # One sequence over all borders, others within a rank, an empty one, and tokens of none.
    rest = shortest * case.ranks * 4 - shortest * 3 - 1
    lengths = (shortest + 1, 0, rest, shortest)
    spare = -sum(lengths) % case.ranks
    return (*lengths, spare) if spare else lengths
