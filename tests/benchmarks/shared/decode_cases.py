"""A decode step, and the kernel that gives its floor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """A decode step, bf16, causal; page_block_size 0: keys and values in one piece."""

    batch: int
    seqlen_q: int
    seqlen: int
    nheads: int
    nheads_k: int
    head_dim: int
    page_block_size: int = 0

    @property
    def name(self) -> str:
        """Returns e.g. "q5 B8 L4096 H32/8 D128 pages of 16"."""
        pages = f" pages of {self.page_block_size}" if self.page_block_size else ""
        return (
            f"q{self.seqlen_q} B{self.batch} L{self.seqlen} H{self.nheads}/{self.nheads_k} "
            f"D{self.head_dim}{pages}"
        )

    @property
    def group(self) -> str:
        """Returns what the means are taken over."""
        queries = "one query" if self.seqlen_q == 1 else "several queries"
        return "pages" if self.page_block_size else queries

    @property
    def kv_bytes(self) -> int:
        """Returns the size of keys and values."""
        return 4 * self.batch * self.seqlen * self.nheads_k * self.head_dim


def read(kv: torch.Tensor) -> torch.Tensor:
    """Returns the sum of 16-bit numbers taken two by two for float32: all is read, little written.

    Args:
        kv: (2, batch, seqlen, nheads_k, head_dim), contiguous.
    """
    return kv.view(torch.float32).sum()
