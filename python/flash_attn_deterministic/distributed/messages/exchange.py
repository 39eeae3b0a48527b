"""Exchanges of tokens between ranks, from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..planning.layout import Layout, Piece
from .ranks import Pending, Ranks


class Route(NamedTuple):
    """The part of one rank in an exchange.

    Args:
        sent: for each rank, the places of the tokens for it in this rank's tensors.
        received: for each rank, the places of the tokens from it in this rank's results.
        tokens: of the results, gaps included.
        filled: whether there are no gaps.
    """

    sent: tuple[tuple[slice, ...], ...]
    received: tuple[tuple[slice, ...], ...]
    tokens: int
    filled: bool


def route(have: Layout, want: Layout, rank: int, tokens: int) -> Route:
    """Plans a rank's part of an exchange.

    Args:
        have: the pieces of each rank; each token is on one of them.
        want: the pieces that each rank gets; several may get the same ones.
        rank: the rank.
        tokens: of the rank's results, gaps included.
    """
    ranks = range(len(have))
    sent = tuple(tuple(mine for mine, _ in _shared(have[rank], want[to])) for to in ranks)
    received = tuple(tuple(its for _, its in _shared(have[by], want[rank])) for by in ranks)
    arriving = sum(_length(place) for places in received for place in places)
    return Route(sent, received, tokens, arriving == tokens)


def _shared(have: Sequence[Piece], want: Sequence[Piece]) -> list[tuple[slice, slice]]:
    """Lists the tokens that both hold, as places in each; in the same order on every rank."""
    pieces: dict[int, list[Piece]] = {}
    for piece in have:
        pieces.setdefault(piece.sequence, []).append(piece)
    places = []
    for wanted in want:
        for piece in pieces.get(wanted.sequence, ()):
            begin, end = max(piece.begin, wanted.begin), min(piece.end, wanted.end)
            if begin < end:
                places.append((_place(piece, begin, end), _place(wanted, begin, end)))
    return places


def _place(piece: Piece, begin: int, end: int) -> slice:
    shift = piece.at - piece.begin
    return slice(begin + shift, end + shift)


def _length(place: slice) -> int:
    return int(place.stop - place.start)


class Arriving:
    """Tensors that are being received."""

    def __init__(
        self,
        way: Route,
        pending: Pending[torch.Tensor],
        like: Sequence[torch.Tensor],
        widths: Sequence[int],
    ) -> None:
        self._way, self._pending, self._widths = way, pending, widths
        self._kinds = [(tensor.dtype, tensor.shape[1:]) for tensor in like]

    def wait(self) -> list[torch.Tensor]:
        """Returns each tensor as (tokens, *rest), with zeros in the gaps."""
        rows = self._pending.wait()
        places = [place for by_rank in self._way.received for place in by_rank]
        result = []
        columns = torch.split(rows, list(self._widths), dim=1)
        for (dtype, rest), column in zip(self._kinds, columns, strict=True):
            make = column.new_empty if self._way.filled else column.new_zeros
            whole = make((self._way.tokens, column.shape[1]))
            parts = torch.split(column, [_length(place) for place in places])
            for place, part in zip(places, parts, strict=True):
                whole[place] = part
            result.append(whole.view(dtype).view(self._way.tokens, *rest))
        return result


def start(ranks: Ranks, way: Route, tensors: Sequence[torch.Tensor], what: str) -> Arriving:
    """Starts an exchange that all ranks take part in.

    Args:
        ranks: the ranks.
        way: this rank's part.
        tensors: each (tokens of this rank, ...), of any dtypes.
        what: description of the tensors, for errors.
    """
    rows = _words(tensors)
    widths = [row.shape[1] for row in rows]
    sent, received = (
        [sum(map(_length, by_rank)) for by_rank in side] for side in (way.sent, way.received)
    )
    # Written without a temporary copy: it may be as long as all that the rank receives.
    packed = rows[0].new_empty((sum(sent), sum(widths)))
    places = [place for to in way.sent for place in to]
    for place, part in zip(places, torch.split(packed, [*map(_length, places)]), strict=True):
        torch.cat([row[place] for row in rows], dim=1, out=part)
    pending = ranks.all_to_all(packed, sent, received, what)
    return Arriving(way, pending, tensors, widths)


def _words(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns each (tokens, ...) as (tokens, words), in the widest words that fit them all.

    Copies move one word at a time: 8 bytes in most cases.
    """
    rows = [tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:])) for tensor in tensors]
    # contiguous() would not copy rows of one number, whatever their stride.
    rows = [
        row if row.stride(-1) == 1 else row.clone(memory_format=torch.contiguous_format)
        for row in rows
    ]
    fits = math.gcd(
        *(
            row.element_size() * number
            for row in rows
            for number in (row.shape[1], row.stride(0), row.storage_offset())
        )
    )
    word = next(word for word in _WORDS if fits % word.itemsize == 0)
    return [row.view(word) for row in rows]


# Types that NCCL can send.
_WORDS = (torch.int64, torch.int32, torch.uint8)
