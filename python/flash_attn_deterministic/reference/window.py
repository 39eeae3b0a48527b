"""The keys that a row sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """Keys from `left` before to `right` after the row's own position; -1: no limit."""

    left: int
    right: int

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int]) -> Window:
        """Makes a window of the arguments, without lengths, so that bits don't depend on these."""
        left, right = window
        return cls(max(left, -1), 0 if causal else max(right, -1))

    @property
    def is_local(self) -> bool:
        """Whether the rows of a sequence see different keys, as with causal."""
        return self.left >= 0 or self.right >= 0

    def visible(self, rows: range, seqlen_k: int) -> tuple[int, int]:
        """Returns the keys [begin, end) that some row sees; begin >= end if there is none."""
        begin = max(0, rows[0] - self.left) if self.left >= 0 else 0
        end = min(seqlen_k, rows[-1] + self.right + 1) if self.right >= 0 else seqlen_k
        return begin, end

    def hidden(
        self, rows: range, keys: range, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Returns (rows, keys), True where the row does not see the key; None if none is hidden."""
        beyond = self.right >= 0 and keys[-1] > rows[0] + self.right
        before = self.left >= 0 and keys[0] < rows[-1] - self.left
        if not (beyond or before):
            return None
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        mask = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=device)
        if beyond:
            mask |= key > row + self.right
        if before:
            mask |= key < row - self.left
        return mask
