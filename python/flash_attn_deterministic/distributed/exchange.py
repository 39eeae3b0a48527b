"""Exchanges of tokens, some heads of them at a time, between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .layout import Numbers, expand
from .ranks import Pending, Ranks

_SLICES = 16  # of more pieces, one index is made
_WORD = 8  # bytes: copies move one at a time, and tensors of a message begin at multiples


class Places:
    """Some pieces of a tensor's first dimension.

    Args:
        at: where each begins.
        length: of each.
    """

    def __init__(self, at: Numbers, length: Numbers) -> None:
        self._at, self._length = at, length
        self.count = int(length.sum())
        self._slices: list[slice] | None = None
        if at.numel() <= _SLICES:
            pairs = zip(at.tolist(), length.tolist(), strict=True)
            self._slices = [slice(begin, begin + tokens) for begin, tokens in pairs]
        self._index: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> Sequence[slice | torch.Tensor]:
        """Returns the pieces, or an index of all."""
        if self._slices is not None:
            return self._slices
        index = self._index.get(device)
        if index is None:
            which, offset = expand(self._length)
            index = self._index[device] = (self._at[which] + offset).to(device)
        return [index]

    def parts(self, block: torch.Tensor) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
        """Yields the pieces, or an index of all, and the parts of a block that belong to them."""
        places, at = self.on(block.device), 0
        for place in places:
            if not isinstance(place, slice) or len(places) == 1:
                yield place, block
                continue
            length = place.stop - place.start
            yield place, block[at : at + length]
            at += length


class Route(NamedTuple):
    """The part of one rank in an exchange.

    Args:
        sent: for each rank, the places of the tokens for it in this rank's tensors.
        received: for each rank, the places of the tokens from it in this rank's results.
        room: tokens of the results, gaps included.
    """

    sent: tuple[Places, ...]
    received: tuple[Places, ...]
    room: int

    @property
    def back(self) -> Route:
        """Returns the way back of all tokens, into tensors that are there."""
        return Route(self.received, self.sent, 0)

    @property
    def filled(self) -> bool:
        """Returns whether the results have no gaps."""
        return sum(one.count for one in self.received) == self.room


Heads = Callable[[int], slice]  # for each rank, heads that are sent to it, or come from it


def all_heads(rank: int) -> slice:
    """Returns all heads."""
    return slice(None)


class Item(NamedTuple):
    """A tensor of a message.

    Args:
        way: of its tokens.
        tensor: (tokens, heads, width), of any dtype.
        heads: how many go to a rank.
        sent: those that are sent to each rank.
        into: the tensor that gets what arrives; None: a new one of `heads` heads.
        placed: heads of `into` that get what each rank sends.
    """

    way: Route
    tensor: torch.Tensor
    heads: int
    sent: Heads = all_heads
    into: torch.Tensor | None = None
    placed: Heads = all_heads

    def words(self, places: Places) -> int:
        """Returns the words of some tokens in a message."""
        width = self.tensor.shape[2] * self.tensor.element_size()
        return -(-places.count * self.heads * width // _WORD)


class Arriving:
    """A message on its way."""

    def __init__(self, rank: int, items: Sequence[Item], pending: Pending) -> None:
        self._rank, self._items, self._pending = rank, items, pending

    def wait(self) -> list[torch.Tensor]:
        """Returns each item's tensor of received tokens, with zeros in the gaps."""
        data, at = self._pending.wait(), 0
        results = []
        for item in self._items:
            into = item.into
            if into is None:
                make = data.new_empty if item.way.filled else data.new_zeros
                shape = item.way.room, item.heads, item.tensor.shape[2]
                into = make(shape, dtype=item.tensor.dtype)
            results.append(into)
        words = [_words(result) for result in results]
        for by in range(len(self._items[0].way.received)):
            for item, result in zip(self._items, words, strict=True):
                places = item.way.received[by]
                if not places.count:
                    continue
                into = result[:, item.placed(by)]
                if by == self._rank:  # the same pieces on both sides
                    here = _words(item.tensor)[:, item.sent(by)]
                    pieces = (one.on(data.device) for one in (item.way.sent[by], places))
                    for from_, to in zip(*pieces, strict=True):
                        into[to] = here[from_]
                    continue
                size = item.words(places)
                for place, part in places.parts(_block(data[at : at + size], into, places)):
                    into[place] = part
                at += size
        return results


def start(ranks: Ranks, items: Sequence[Item], what: str) -> Arriving:
    """Starts an exchange that all ranks take part in, as one message to each.

    Args:
        ranks: the ranks.
        items: what is sent.
        what: description of it, for errors.
    """
    sent, received = (
        [
            sum(map(Item.words, items, of_rank)) if rank != ranks.rank else 0
            for rank, of_rank in enumerate(zip(*ways, strict=True))
        ]
        for ways in ([item.way.sent for item in items], [item.way.received for item in items])
    )
    data = torch.empty(sum(sent), dtype=torch.int64, device=items[0].tensor.device)
    at = 0
    words = [_words(item.tensor) for item in items]
    for to in range(ranks.size):
        for item, tensor in zip(items, words, strict=True):
            places = item.way.sent[to]
            if to == ranks.rank or not places.count:
                continue
            from_, size = tensor[:, item.sent(to)], item.words(places)
            for place, part in places.parts(_block(data[at : at + size], from_, places)):
                part.copy_(from_[place])
            at += size
    return Arriving(ranks.rank, items, ranks.all_to_all(data, sent, received, what))


def _block(data: torch.Tensor, like: torch.Tensor, places: Places) -> torch.Tensor:
    """Returns a part of a message as (tokens, heads, words)."""
    shape = places.count, *like.shape[1:]
    return data.view(like.dtype)[: math.prod(shape)].view(shape)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the widest words that fit it."""
    size = tensor.element_size()
    if size < _WORD and tensor.shape[2] * size % _WORD == 0:
        steps = (*tensor.stride()[:2], tensor.storage_offset())
        if tensor.stride(2) != 1 or any(step * size % _WORD for step in steps):
            tensor = tensor.contiguous()
        return tensor.view(torch.int64)
    return tensor.view(torch.int64 if size == _WORD else torch.int32)
