"""Layouts: which tokens of all sequences each rank holds, and where.

Tokens are numbered through all sequences, as in cu_seqlens. Numbers are int64 tensors on the CPU,
so that thousands of sequences are planned in a few operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..checks.describe import shown, type_name
from ..errors import ArgumentError, ArgumentTypeError

CONTIGUOUS = "contiguous"
ZIGZAG = "zigzag"
ORDERS = (CONTIGUOUS, ZIGZAG)
Numbers = torch.Tensor


def check_order(order: Any) -> str:
    """Returns the argument `order`.

    Raises:
        ArgumentError: it is none of ORDERS; ArgumentTypeError: it is no str.
    """
    if not isinstance(order, str):
        raise ArgumentTypeError(f"order: expected a str, got {type_name(order)}")
    if order not in ORDERS:
        raise ArgumentError(f"order: expected one of {', '.join(ORDERS)}, got {shown(order)}")
    return order


class Layout(NamedTuple):
    """Pieces of sequences in the order of tokens: [begin, end), from row `at` of a rank's tensor.

    Neighbours of one sequence and rank are one piece.
    """

    rank: Numbers
    sequence: Numbers
    begin: Numbers
    end: Numbers
    at: Numbers

    def select(self, which: Numbers) -> Layout:
        """Returns some pieces: a mask, or their numbers."""
        if which.dtype == torch.bool:
            which = which.nonzero().flatten()
        return Layout(*(one.index_select(0, which) for one in self))

    def of_teams(self, degree: int) -> Layout:
        """Returns pieces of `degree` ranks that follow one another; `at` has no meaning there."""
        if degree == 1:
            return self
        rank = self.rank // degree
        new = torch.ones(rank.numel() + 1, dtype=torch.bool)
        new[1:-1] = (rank.diff() != 0) | (self.sequence.diff() != 0)
        new[1:-1] |= self.begin[1:] != self.end[:-1]
        joined = self._replace(rank=rank).select(new[:-1])
        return joined._replace(end=self.end[new[1:]])

    def place(self, token: Numbers) -> Numbers:
        """Returns the row that tokens have in the tensor of their rank."""
        piece = torch.searchsorted(self.begin, token, right=True) - 1
        return self.at[piece] + token - self.begin[piece]


def layout_of(
    starts: Sequence[int], total: int, ranks: int, order: str, name: str, dense: bool = False
) -> Layout:
    """Lays out sequences.

    Args:
        starts: the values of cu_seqlens: where each sequence begins in all tokens, and the last
            end.
        total: tokens on each rank.
        ranks: number of ranks.
        order: "contiguous": rank r holds the r-th of P parts of all tokens, whatever sequences they
            belong to; "zigzag": of each sequence it holds the r-th and the r-th from the end of 2 P
            parts, so that all ranks have the same work under a causal mask. Each rank has equally
            many rows for a part; the last ones may not fill them.
        name: of the argument, for errors.
        dense: whether the sequences have one length, and are each cut in the contiguous order too.

    Raises:
        ArgumentError: starts that don't begin with 0, decrease, or don't fit the tokens; or an odd
            number of tokens of a dense sequence on a rank in the zigzag order.
    """
    given = torch.tensor(starts, dtype=torch.long)
    lengths = given.diff()
    if not starts or starts[0] != 0 or bool((lengths < 0).any()):
        raise ArgumentError(
            f"{name}: expected a 0, then numbers that don't decrease, got {_some(starts)}"
        )
    if dense:
        seqlen = total // max(len(starts) - 1, 1)
        if order == ZIGZAG and seqlen % 2:
            raise ArgumentError(
                f"{name}: expected an even number of tokens on each rank with order='zigzag', got "
                f"{seqlen}"
            )
        return _cut_each(given, ranks, order)
    if order == ZIGZAG:
        rows = int(zigzag_rows(lengths, ranks).sum())
        if total != rows:
            raise ArgumentError(
                f"{name}: expected {rows} tokens on each of {ranks} ranks with order='zigzag', "
                f"which cuts each sequence into 2 * {ranks} parts, got {total}"
            )
        return _cut_each(given, ranks, order)
    if starts[-1] > total * ranks:
        raise ArgumentError(
            f"{name}: expected at most {total * ranks} tokens, {total} on each of {ranks} ranks, "
            f"got {starts[-1]}"
        )
    borders = (torch.arange(ranks) * total).clamp(max=starts[-1])
    borders = torch.unique(torch.cat([given, borders]))  # type: ignore[no-untyped-call, unused-ignore]
    begin, end = borders[:-1], borders[1:]
    rank = begin // max(total, 1)
    sequence = torch.searchsorted(given, begin, right=True) - 1
    return Layout(rank, sequence, begin, end, begin - rank * total)


def zigzag_rows(lengths: Numbers, ranks: int) -> Numbers:
    """Returns how many rows each rank has for sequences in the zigzag order."""
    return -(lengths // (-2 * ranks)) * 2


def _cut_each(starts: Numbers, ranks: int, order: str) -> Layout:
    """Cuts each sequence into parts, one or two for each rank."""
    units, count, part = ranks, ranks, torch.arange(ranks)
    begins, rank, second = part, part, part * 0
    if order == ZIGZAG:  # the two parts of the last rank are one
        units, count, part = 2 * ranks, 2 * ranks - 1, torch.arange(2 * ranks - 1)
        second = (part >= ranks).long()
        begins, rank = part + second, torch.minimum(part, count - 1 - part)
    rows = zigzag_rows(starts.diff(), ranks) if order == ZIGZAG else starts.diff() // ranks
    unit = (rows // (units // ranks))[:, None]
    begin = torch.minimum(starts[:-1, None] + begins * unit, starts[1:, None])
    end = torch.cat([begin[:, 1:], starts[1:, None]], 1)
    at = (rows.cumsum(0) - rows)[:, None] + second * unit
    sequence = torch.arange(starts.numel() - 1)[:, None]
    pieces = (rank.expand_as(begin), sequence.expand_as(begin), begin, end, at)
    found = Layout(*(one.flatten() for one in pieces))
    some = found.begin < found.end
    return found if bool(some.all()) else found.select(some)


class Overlaps(NamedTuple):
    """Tokens that pieces share with intervals: indices of both, begin and end."""

    part: Numbers
    want: Numbers
    begin: Numbers
    end: Numbers


def overlaps(parts: Layout, begin: Numbers, end: Numbers) -> Overlaps:
    """Finds the tokens that pieces share with intervals, in the order of these and of tokens."""
    first = torch.searchsorted(parts.end, begin, right=True)
    counts = (torch.searchsorted(parts.begin, end) - first).clamp(min=0) * (begin < end)
    want, offset = expand(counts)
    part = first[want] + offset
    low = torch.maximum(parts.begin[part], begin[want])
    return Overlaps(part, want, low, torch.minimum(parts.end[part], end[want]))


def summed(count: int, index: Numbers, numbers: Numbers) -> Numbers:
    """Returns the sums of the numbers of each index."""
    return torch.zeros(count, dtype=numbers.dtype).index_add_(0, index, numbers)


def expand(counts: Numbers, total: int | None = None) -> tuple[Numbers, Numbers]:
    """Returns 0 0 0 1 1 ... and 0 1 2 0 1 ... for the counts 3 2 ..., of the sum `total`."""
    which = torch.repeat_interleave(counts, output_size=total)
    offset = torch.arange(which.numel(), device=counts.device)
    return which, offset - (counts.cumsum(0) - counts)[which]


def tokens_of(layout: Layout, rank: int, total: int, none: int | None = None) -> Numbers:
    """Returns, for each of `total` places of a rank's tensor, the token there.

    `none` stands for no token; None: such places have tokens of no sequence.
    """
    own = layout.select(layout.rank == rank)
    index = torch.arange(rank * total, (rank + 1) * total)
    if none is not None:
        index.fill_(none)
    which, offset = expand(own.end - own.begin)
    index[own.at[which] + offset] = own.begin[which] + offset
    return index


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}{', ...' if len(numbers) > 8 else ''}]"
