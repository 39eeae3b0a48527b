"""Attention over sequences of different lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .dense import attend
from .walk import Walk


@dataclass(frozen=True)
class Slots:
    """The places of a sequence's tokens in buffers of shape (rows, tokens, nheads_k, head_dim).

    Args:
        tokens: tokens per row; per page if there is a block table.
        rows: a sequence's row of the buffer, if there is no block table.
        block_table: (batch, pages of a sequence): a sequence's rows of the buffer, in order.
    """

    tokens: int
    rows: Sequence[int] = ()
    block_table: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.tokens * (1 if self.block_table is None else self.block_table.shape[1])

    def __call__(self, sequence: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns row and place of the tokens [begin, end), as indices into the buffer."""
        token = torch.arange(begin, end, device="cpu")
        if self.block_table is None:
            return torch.full_like(token, self.rows[sequence]), token
        page = torch.div(token, self.tokens, rounding_mode="floor")
        return self.block_table[sequence].long().cpu()[page], token % self.tokens


def attend_sequences(
    walk: Walk,
    seqlens: Sequence[tuple[int, int]],
    rows: Callable[[int], torch.Tensor],
    keys: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    slopes: torch.Tensor | None,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields each sequence's index, out (seqlen_q, nheads, head_dim) and lse (nheads, seqlen_q).

    Sequences of equal length are computed together; bits don't depend on that.

    Args:
        walk: of the call.
        seqlens: (seqlen_q, used seqlen_k) of each sequence.
        rows: maps a sequence to its queries (seqlen_q, nheads, head_dim).
        keys: maps a sequence to its keys and values in use (used seqlen_k, nheads_k, head_dim).
        slopes: (batch, nheads), or None.
    """
    alike = defaultdict(list)
    for sequence, lengths in enumerate(seqlens):
        alike[lengths].append(sequence)
    for (seqlen_q, _), sequences in alike.items():
        if seqlen_q == 0:
            continue
        k, v = zip(*map(keys, sequences), strict=True)
        out, softmax_lse = attend(
            walk,
            torch.stack([rows(sequence) for sequence in sequences]),
            torch.stack(k),
            torch.stack(v),
            None if slopes is None else slopes[sequences],
            sequences,
        )
        yield from zip(sequences, out, softmax_lse, strict=True)
