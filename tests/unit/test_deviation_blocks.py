from __future__ import annotations

import pytest
from flash_attn_deterministic.deviation.emulate.blocks import Blocks, blocks_of_sram, check_fit
from flash_attn_deterministic.errors import ArgumentError


@pytest.mark.parametrize(
    ("sram", "head_dim", "shape", "expected"),
    [
        pytest.param(16384, 64, "paper", Blocks(64, 64), id="equal"),
        pytest.param(65536, 64, "paper", Blocks(64, 256), id="paper"),
        pytest.param(65536, 64, "swapped", Blocks(256, 64), id="swapped"),
        pytest.param(1000, 64, "paper", Blocks(4, 4), id="rounded-up"),
        pytest.param(256, 64, "paper", Blocks(1, 1), id="smallest"),
    ],
)
def test_blocks_of_memory(sram: int, head_dim: int, shape: str, expected: Blocks) -> None:
    assert blocks_of_sram(sram, head_dim, shape) == expected


@pytest.mark.parametrize(
    ("sram", "head_dim", "shape", "message"),
    [
        pytest.param(255, 64, "paper", "sram: expected at least 4", id="no-row-fits"),
        pytest.param(256, 0, "paper", "head_dim: expected at least 1", id="head-dim"),
        pytest.param(256, 64, "round", "shape: expected one of", id="shape"),
    ],
)
def test_bad_memory_is_refused(sram: int, head_dim: int, shape: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        blocks_of_sram(sram, head_dim, shape)


def test_free_blocks_must_fit() -> None:
    check_fit(Blocks(64, 64), 16384, 64)
    with pytest.raises(ArgumentError, match="block_r, block_c: expected"):
        check_fit(Blocks(64, 65), 16384, 64)
    with pytest.raises(ArgumentError, match="block_c: expected at least 1, got 0"):
        Blocks(1, 0)
