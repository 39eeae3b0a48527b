"""Which weights a call drops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._dropout import keep_mask, keep_probability
from ..errors import ArgumentError


class Place(NamedTuple):
    """Where a tile of rows lies in its call.

    Args:
        sequences: index of each sequence in the batch.
        heads_k: the heads of keys and values.
        first_row: the first row, counted among the queries of its sequence.
    """

    sequences: list[int]
    heads_k: range
    first_row: int


@dataclass(frozen=True)
class Dropout:
    """A dropout mask.

    Args:
        probability: in (0, 1).
        rng_state: (2,), int64: seed and offset, on the CPU.
    """

    probability: float
    rng_state: torch.Tensor

    @classmethod
    def of(cls, probability: float, rng_state: torch.Tensor | None) -> Dropout | None:
        """Makes one of the arguments of a call; None without dropout.

        Raises:
            ArgumentError: dropout without rng_state.
        """
        if probability == 0:
            return None
        if rng_state is None:
            raise ArgumentError(
                f"rng_state: expected seed and offset with dropout_p {probability}, got None"
            )
        return cls(probability, rng_state)

    @property
    def keep_scale(self) -> float:
        """What the remaining weights are multiplied by, before it is rounded."""
        return 1.0 / keep_probability(self.probability)

    def keep(self, place: Place, group: int, rows: range, keys: range) -> torch.Tensor:
        """Returns (batch, nheads_k, group, rows, keys), True where a weight remains.

        Args:
            place: of the tile.
            group: query heads per head of keys.
            rows: as many as there are in the tile.
            keys: counted from the beginning of the sequence.
        """
        device = self.rng_state.device
        first_head, last_head = (head * group for head in (place.heads_k.start, place.heads_k.stop))
        heads = torch.arange(first_head, last_head, device=device)
        first = place.first_row
        mask = keep_mask(
            self.rng_state,
            self.probability,
            torch.tensor(place.sequences, device=device),
            heads,
            (first, first + len(rows)),
            (keys.start, keys.stop),
        )
        return mask.reshape(mask.shape[0], len(place.heads_k), group, *mask.shape[2:])
