"""Exchanges of rows of tensors, some heads of them at a time, between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .layout import Numbers, expand, summed
from .ranks import Ranks

_WORD = torch.int32  # what messages are made of
_ALIGN = 4  # words; torch gathers rows at multiples of 16 bytes by a faster kernel
_gather = torch.ops.aten.index.Tensor_out
Stream = tuple[torch.device, int]


def stream_of(device: torch.device) -> Stream:
    """Returns a key for tensors that are kept: the allocator orders memory by streams."""
    if device.type != "cuda":
        return device, 0
    return device, torch.cuda.current_stream(device).cuda_stream


class Places:
    """Rows of a tensor, in the order of the ranks that they go to or come from.

    Args:
        rank: this rank.
        ranks: their number.
        other: rank that a piece of rows goes to or comes from; it may be this one.
        at: where the piece begins.
        length: of the piece.
        head: the part of the heads that it has; None: it comes, and has all that come.
        parts: into which heads are divided.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        other: Numbers,
        at: Numbers,
        length: Numbers,
        head: Numbers | None = None,
        parts: int = 1,
    ) -> None:
        self.counts = summed(ranks, other, length).tolist()  # of each other rank
        self.total, self.counts[rank] = sum(self.counts), 0
        self.others, self.parts = sum(self.counts), parts
        # This rank's own are the last ones that go, and the first ones that come.
        own = -1 if head is None else ranks
        order = torch.where(other == rank, own, other).argsort(stable=True)
        heads = torch.zeros_like(at) if head is None else head
        self._pieces = at[order], length[order], heads[order]
        self._index: dict[Stream, torch.Tensor] = {}
        self._inverse: dict[Stream, torch.Tensor] = {}

    def index(self, stream: Stream) -> torch.Tensor:
        """Returns the rows: `parts` for each token."""
        found = self._index.get(stream)
        if found is None:
            at, length, head = (one.to(stream[0]) for one in self._pieces)
            which, offset = expand(length, self.total)
            found = self._index[stream] = (at[which] + offset) * self.parts + head[which]
        return found

    def inverse(self, stream: Stream, room: int, first: int) -> torch.Tensor:
        """Returns which row each of `room` rows is, if these are from `first`; behind them: none.

        Kept for the same room and first.
        """
        found = self._inverse.get(stream)
        if found is None:
            found = torch.full((room,), first + self.total, device=stream[0])
            found[self.index(stream)] = torch.arange(first, first + self.total, device=stream[0])
            self._inverse[stream] = found
        return found


class Route(NamedTuple):
    """The part of one rank in an exchange."""

    sent: Places  # rows of this rank's tensors: of other ranks, then its own
    # rows of its results: its own, then those of other ranks; on the way back the other way round
    received: Places
    room: int  # rows of the results, gaps included
    is_back: bool = False  # whether this is a way back, into tensors that are there

    @property
    def back(self) -> Route:
        """Returns the way back of all rows."""
        return Route(self.received, self.sent, 0, True)


class Heads(NamedTuple):
    """Some heads of a tensor (tokens, heads, width), to be sent or written."""

    rows: torch.Tensor  # of words: of each token one for each part of the heads
    dtype: torch.dtype  # of the tensor
    number: int  # of heads, in each part
    width: int  # of a head

    def some(self, first: int, number: int) -> Heads:
        """Returns `number` heads from `first` on, in each part."""
        if number == self.number:
            return self
        words = self.rows.shape[1] // self.number
        rows = self.rows[:, first * words : (first + number) * words]
        return self._replace(rows=rows, number=number)


def heads_of(tensor: torch.Tensor, parts: int) -> Heads:
    """Returns all heads of a tensor (tokens, heads, width); a copy of one that is not in one piece.

    They are divided into `parts`.
    """
    offset = tensor.storage_offset() * tensor.element_size()
    if not tensor.is_contiguous() or tensor.stride(-1) != 1 or offset % _WORD.itemsize:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    tokens, heads, width = tensor.shape
    words, number = tensor.view(_WORD), heads // parts
    rows = words.view(tokens * parts, number * words.shape[2])
    return Heads(rows, tensor.dtype, number, width)


class Arriving:
    """Rows of some tensors on their way: one message to each rank, and memory for all.

    A row of a message has the heads of all tensors; rows of all but the last one have to be
    multiples of 16 bytes. All ranks start the same exchanges in the same order. Errors say `what`
    the tensors are.
    """

    def __init__(
        self, ranks: Ranks, route: Route, given: Sequence[Heads], stream: Stream, what: str
    ) -> None:
        self._route, self._stream = route, stream
        self._forms = [one[1:] for one in given]  # not the tensors, which may go
        sent, received = route.sent, route.received
        self._widths = [one.rows.shape[1] for one in given]
        self._widths.append(-sum(self._widths) % _ALIGN)
        has_gaps = received.total < route.room
        # Rows that stay here are between the sent ones and the others that arrive.
        size = sent.total + received.others + has_gaps, sum(self._widths)
        data = torch.empty(size, dtype=_WORD, device=stream[0])
        if route.is_back:
            packed, going = data[received.others :], data[received.total :]
            arriving = data[: received.others]
        else:
            packed, going = data[: sent.total], data[: sent.others]
            arriving = data[sent.total : sent.total + received.others]
            if has_gaps:
                data[-1].zero_()
        index = [sent.index(stream)]
        for one, part in zip(given, packed.split_with_sizes(self._widths, 1), strict=False):
            _gather(one.rows, index, out=part)
        # What arrives, and what stays here, is from this row.
        self._data, self._first = data, 0 if route.is_back else sent.others
        self._pending = ranks.all_to_all(going, arriving, sent.counts, received.counts, what)

    def new(self) -> list[torch.Tensor]:
        """Returns what arrived as tensors (room, heads, width), with zeros in the gaps.

        They are views of one tensor, whose rows have all of them.
        """
        self._pending.wait()
        received, room = self._route.received, self._route.room
        rows = self._data[received.inverse(self._stream, room, self._first)]
        found, column = [], 0
        for (dtype, number, width), words in zip(self._forms, self._widths, strict=False):
            each = _WORD.itemsize // dtype.itemsize
            strides = rows.shape[1] * each, width, 1
            typed = rows.view(dtype)
            found.append(typed.as_strided((room, number, width), strides, column * each))
            column += words
        return found

    def into(self, targets: Sequence[Heads]) -> None:
        """Writes what arrived into tensors that are in one piece."""
        self._pending.wait()
        received = self._route.received
        index = received.index(self._stream)
        arrived = self._data[self._first : self._first + received.total]
        for target, part in zip(targets, arrived.split_with_sizes(self._widths, 1), strict=False):
            target.rows.index_copy_(0, index, part)
