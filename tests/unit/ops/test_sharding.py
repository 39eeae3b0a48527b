"""DTensors with heads or the batch over two ranks, and FSDP2: the bits of one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sharded_calls
import torch
from rank_pool import Pool, RankFailed, pool_of


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two processes."""
    with pool_of(2) as two:
        yield two


@pytest.mark.parametrize("dimension", [2, 0], ids=["heads", "batch"])
def test_dense(pool: Pool, dimension: int) -> None:
    assert pool.run(sharded_calls.dense, dimension) == [[True] * 5] * 2


def test_dropout_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"UnsupportedError: dropout_p: expected 0\.0 with"):
        pool.run(sharded_calls.dense, 2, 0.3)


def test_a_head_of_keys_that_all_ranks_need(pool: Pool) -> None:
    assert pool.run(sharded_calls.one_kv_head) == [[True] * 4 + [False]] * 2


@pytest.mark.parametrize(
    "seqlens",
    [
        # It looks for the mesh in the first argument alone, which is None there.
        pytest.param(False, id="qkv", marks=pytest.mark.skipif(
            torch.__version__.startswith("2.10."), reason="torch 2.10 shards no such call")),
        pytest.param(True, id="varlen"),
    ],
)  # fmt: skip
def test_packed(pool: Pool, seqlens: bool) -> None:
    count = 5 if seqlens else 3
    assert pool.run(sharded_calls.packed, seqlens) == [[True] * count] * 2


def test_fsdp(pool: Pool) -> None:
    assert pool.run(sharded_calls.fsdp) == [[True] * 5] * 2
