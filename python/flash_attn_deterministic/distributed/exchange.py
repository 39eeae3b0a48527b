"""Exchanges of rows of tensors, some heads of them at a time, between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .layout import Numbers, expand
from .ranks import Ranks

_WORD = torch.int32  # what messages are made of
_ALIGN = 4  # words; torch gathers rows at multiples of 16 bytes by a faster kernel
_gather = torch.ops.aten.index.Tensor_out
Key = tuple[torch.device, int]


def stream_of(device: torch.device) -> Key:
    """Returns a key for tensors that are kept: the allocator orders memory by streams."""
    if device.type != "cuda":
        return device, 0
    return device, torch.cuda.current_stream(device).cuda_stream


class Places:
    """Rows of a tensor, in the order of the ranks that they go to or come from.

    Args:
        own: rows of this rank.
        counts: of each other one.
        at: where pieces of rows begin.
        length: of these.
        head: of each piece, the part of the heads; with `parts` > 1.
        parts: into which heads are divided.
    """

    def __init__(
        self,
        own: int,
        counts: Sequence[int],
        at: Numbers,
        length: Numbers,
        head: Numbers | None = None,
        parts: int = 1,
    ) -> None:
        self.counts, self.others, self.parts = counts, sum(counts), parts
        self.total = own + self.others
        self._pieces = at, length, torch.zeros_like(at) if head is None else head
        self._index: dict[Key, torch.Tensor] = {}
        self._inverse: dict[Key, torch.Tensor] = {}

    def index(self, device: torch.device) -> torch.Tensor:
        """Returns the rows: `parts` for each token."""
        key = stream_of(device)
        found = self._index.get(key)
        if found is None:
            at, length, head = (one.to(device) for one in self._pieces)
            which, offset = expand(length, self.total)
            found = self._index[key] = (at[which] + offset) * self.parts + head[which]
        return found

    def inverse(self, device: torch.device, room: int, first: int) -> torch.Tensor:
        """Returns which row each of `room` rows is, if these are from `first`; behind them: none.

        Kept for the same room and first.
        """
        key = stream_of(device)
        found = self._inverse.get(key)
        if found is None:
            found = torch.full((room,), first + self.total, device=device)
            found[self.index(device)] = torch.arange(first, first + self.total, device=device)
            self._inverse[key] = found
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
    """Some heads of a tensor (tokens, heads, width) on their way."""

    tensor: torch.Tensor  # from or into which rows go; contiguous if into it
    first: int  # head, in each part of the heads
    size: int  # heads

    def rows(self, parts: int) -> torch.Tensor:
        """Returns rows of words: of each token one for each part of the heads."""
        words = in_one_piece(self.tensor).view(_WORD)
        tokens, heads, width = words.shape
        shape, strides = (tokens * parts, self.size * width), (heads // parts * width, 1)
        return words.as_strided(shape, strides, words.storage_offset() + self.first * width)


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that is contiguous from a whole word on: the same, or a copy."""
    offset = tensor.storage_offset() * tensor.element_size()
    if tensor.is_contiguous() and tensor.stride(-1) == 1 and offset % _WORD.itemsize == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class Arriving:
    """Rows of some tensors on their way: one message to each rank, and memory for all.

    A row of a message has the heads of all tensors. All ranks start the same exchanges in the same
    order.

    Args:
        ranks: the ranks.
        route: of the rows.
        given: the tensors.
        what: description of them, for errors.
    """

    def __init__(self, ranks: Ranks, route: Route, given: Sequence[Heads], what: str) -> None:
        self._route = route
        self._shapes = [(one.tensor.dtype, one.size, one.tensor.shape[2]) for one in given]
        sent, received = route.sent, route.received
        device = given[0].tensor.device
        rows = [one.rows(sent.parts) for one in given]
        self._widths = [one.shape[1] for one in rows]
        self._widths.append(-sum(self._widths) % _ALIGN)
        has_gaps = received.total < route.room
        # Rows that stay here are between the sent ones and the others that arrive.
        data = rows[0].new_empty((sent.total + received.others + has_gaps, sum(self._widths)))
        if route.is_back:
            packed, going = data[received.others :], data[received.total :]
            arriving = data[: received.others]
        else:
            packed, going = data[: sent.total], data[: sent.others]
            arriving = data[sent.total : sent.total + received.others]
            if has_gaps:
                data[-1].zero_()
        index = [sent.index(device)]
        for one, part in zip(rows, packed.split_with_sizes(self._widths, 1), strict=False):
            _gather(one, index, out=part)
        # What arrives, and what stays here, is from this row.
        self._data, self._first = data, 0 if route.is_back else sent.others
        self._pending = ranks.all_to_all(going, arriving, sent.counts, received.counts, what)

    def new(self) -> list[torch.Tensor]:
        """Returns what arrived as new tensors (room, heads, width), with zeros in the gaps."""
        received, room = self._route.received, self._route.room
        index = received.inverse(self._data.device, room, self._first)
        found = []
        for (dtype, *shape), part in zip(self._shapes, self._parts(self._data), strict=False):
            found.append(part[index].view(dtype).view(room, *shape))
        return found

    def into(self, targets: Sequence[Heads]) -> None:
        """Writes what arrived into contiguous tensors."""
        received = self._route.received
        index = received.index(self._data.device)
        arrived = self._data[self._first : self._first + received.total]
        for target, part in zip(targets, self._parts(arrived), strict=False):
            target.rows(received.parts).index_copy_(0, index, part)

    def _parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        self._pending.wait()
        parts: Sequence[torch.Tensor] = rows.split_with_sizes(self._widths, 1)
        return parts
