"""Layouts: which tokens of all sequences each rank holds, and where.

Tokens are numbered through all sequences, as in cu_seqlens. Numbers are int64 tensors on the CPU,
so that thousands of sequences are planned in a few operations.
"""

from __future__ import annotations

import itertools
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
    """Pieces of tokens: [begin, end), on a rank, from index `at` of its tensor on."""

    rank: Numbers
    begin: Numbers
    end: Numbers
    at: Numbers

    def select(self, which: Numbers) -> Layout:
        """Returns some pieces."""
        return Layout(*(one[which] for one in self))


def dense_layout(batch: int, seqlen: int, ranks: int, order: str, name: str = "q") -> Layout:
    """Lays out sequences of one length, each of them cut over all ranks.

    Args:
        batch: number of sequences.
        seqlen: tokens of a sequence on each rank.
        ranks: number of ranks.
        order: "contiguous": rank r holds the r-th of P parts; "zigzag": it holds the r-th and the
            r-th from the end of 2 P parts, so that all ranks have the same work under a causal
            mask.
        name: of the argument, for errors.

    Raises:
        ArgumentError: seqlen is odd, and the order is zigzag.
    """
    if order == ZIGZAG and seqlen % 2:
        raise ArgumentError(
            f"{name}: expected an even number of tokens on each rank with order='zigzag', got "
            f"{seqlen}"
        )
    starts = torch.arange(batch + 1) * (seqlen * ranks)
    return _cut_each(starts, ranks, order)


def packed_layout(starts: tuple[int, ...], total: int, ranks: int, order: str, name: str) -> Layout:
    """Lays out packed sequences.

    Args:
        starts: the values of cu_seqlens: where each sequence begins in all tokens, and the last
            end.
        total: tokens on each rank.
        ranks: number of ranks.
        order: "contiguous": rank r holds the r-th of P parts of all tokens, whatever sequences they
            belong to; "zigzag": of each sequence it holds the r-th and the r-th from the end of 2 P
            parts.
        name: of the argument with the starts, for errors.

    Raises:
        ArgumentError: starts that don't begin with 0, decrease, or don't fit the tokens; a length
            that does not divide by 2 P in the zigzag order.
    """
    if not starts or starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)):
        raise ArgumentError(
            f"{name}: expected a 0, then numbers that don't decrease, got {_some(starts)}"
        )
    given = torch.tensor(starts)
    if order == ZIGZAG:
        lengths = given.diff()
        for sequence in (lengths % (2 * ranks)).nonzero().flatten().tolist():
            raise ArgumentError(
                f"{name}: expected lengths that divide by 2 * {ranks} ranks with order='zigzag', "
                f"got {int(lengths[sequence])} tokens in sequence {sequence}"
            )
    if starts[-1] > total * ranks or (order == ZIGZAG and starts[-1] != total * ranks):
        raise ArgumentError(
            f"{name}: expected {'' if order == ZIGZAG else 'at most '}{total * ranks} tokens, "
            f"{total} on each of {ranks} ranks, got {starts[-1]}"
        )
    if order == ZIGZAG:
        return _cut_each(given, ranks, order)
    rank = torch.arange(ranks)
    whole = Layout(
        rank, rank * total, ((rank + 1) * total).clamp(max=starts[-1]), torch.zeros_like(rank)
    )
    return whole.select(whole.begin < whole.end)


def _cut_each(starts: Numbers, ranks: int, order: str) -> Layout:
    """Cuts each sequence into parts of one length, one or two for each rank."""
    parts = torch.arange(ranks)[:, None, None]  # (ranks, sequences, parts of a rank)
    count = ranks
    if order == ZIGZAG:
        count = 2 * ranks
        parts = torch.cat([parts, count - 1 - parts], 2)
    length = (starts.diff() // count)[:, None]
    begin = starts[:-1, None] + parts * length
    at = (starts[:-1, None] // ranks) + torch.arange(parts.shape[2]) * length
    rank = torch.arange(ranks)[:, None, None].expand_as(begin)
    pieces = (rank, begin, begin + length, at.expand_as(begin))
    found = Layout(*(one.flatten() for one in pieces))
    return found.select(found.begin < found.end)


class Overlaps(NamedTuple):
    """Tokens that pieces of two layouts share: indices of both pieces, begin and end."""

    part: Numbers
    want: Numbers
    begin: Numbers
    end: Numbers


def overlaps(parts: Layout, begin: Numbers, end: Numbers) -> Overlaps:
    """Finds the tokens that pieces share with intervals, in the order of these and of tokens.

    Args:
        parts: pieces without common tokens, of at least one token each.
        begin: of the intervals.
        end: likewise.
    """
    order = parts.begin.argsort()
    begins, ends = parts.begin[order], parts.end[order]
    first = torch.searchsorted(ends, begin, right=True)
    counts = (torch.searchsorted(begins, end) - first).clamp(min=0) * (begin < end)
    want, offset = expand(counts)
    at = first[want] + offset
    shared = torch.maximum(begins[at], begin[want]), torch.minimum(ends[at], end[want])
    return Overlaps(order[at], want, *shared)


def expand(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Returns 0 0 0 1 1 ... and 0 1 2 0 1 ... for the counts 3 2 ..."""
    which = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    return which, torch.arange(which.numel()) - (counts.cumsum(0) - counts)[which]


def tokens_of(layout: Layout, rank: int, total: int) -> Numbers:
    """Returns, for each place of a rank's tensor, the token there; tokens of no sequence last.

    Args:
        layout: of all tokens of sequences.
        rank: the rank.
        total: tokens on each rank.
    """
    own = layout.select(layout.rank == rank)
    index = torch.arange(rank * total, (rank + 1) * total)
    which, offset = expand(own.end - own.begin)
    index[own.at[which] + offset] = own.begin[which] + offset
    return index


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}{', ...' if len(numbers) > 8 else ''}]"
