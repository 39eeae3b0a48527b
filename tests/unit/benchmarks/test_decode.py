"""How the decode benchmark prepares what it times."""

from __future__ import annotations

import torch

from tests.benchmarks.decode import shuffled_pages


def test_pages_hold_every_token_once_wherever_they_lie() -> None:
    kv = torch.randn(2, 3, 64, 2, 8)
    pages, block_table = shuffled_pages(kv)
    assert pages.shape == (2, 12, 16, 2, 8)
    assert block_table.shape == (3, 4)
    assert block_table.dtype == torch.int32
    assert sorted(block_table.flatten().tolist()) == list(range(12))
    assert torch.equal(pages[:, block_table.long()].flatten(2, 3), kv)
