"""The model of the time over P ranks keeps to what has to hold of any schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import rank_functions as ranks
from flash_attn_deterministic.distributed.planning.steps import find_units
from rank_pool import pool_of

from tests.benchmarks import ranks_model as model

FREE = replace(model.NVLINK, link=math.inf, latency=0.0)
SHAPE = model.Shape(65_536)


def test_one_rank_does_all_of_it() -> None:
    forward = model.forward_seconds(SHAPE, 1, model.NVLINK)
    assert forward == pytest.approx(2 * 32 * 128 * 65_536**2 / 590e12)
    backward = model.chain_seconds(SHAPE, 1, model.NVLINK)
    assert backward == model.gathered_seconds(SHAPE, 1, model.NVLINK)
    assert backward == pytest.approx(2.5 * forward * 590 / 320)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("nheads_k", [1, 8])
def test_ranks_wait_for_the_first_and_the_last_head(count: int, nheads_k: int) -> None:
    shape = replace(SHAPE, nheads=4 * nheads_k, nheads_k=nheads_k)
    units = len(find_units(shape.nheads, shape.nheads_k, 1, count))
    assert units == (16 if (count, nheads_k) == (2, 8) else shape.nheads)
    least = (count - 1) / (units + count - 1)
    found = model.bubble(shape, count)
    if count == 2:
        assert found == pytest.approx(least, rel=0.05)
    # More ranks wait for each other's batches, too.
    assert least * 0.95 <= found <= least * 2


def test_the_benchmark_runs_over_gloo() -> None:
    with pool_of(2) as pool:
        for case in pool.run(ranks.benchmarked, 128):
            assert case["same_bits"] is True
            assert set(case["seconds"]) == {"ours_by_1", "ours_by_2", "ours_gathered", "one"}
            assert case["efficiency"].keys() == {"forward", "both"}
            assert case["refused"] == {}


def test_gathering_doubles_the_work() -> None:
    one = model.gathered_seconds(SHAPE, 1, FREE)
    assert model.gathered_seconds(SHAPE, 4, FREE) == pytest.approx(one / 2)


@pytest.mark.parametrize("seconds", [model.chain_seconds, model.gathered_seconds])
def test_a_slower_link_never_helps(seconds: model.Seconds) -> None:
    times = [seconds(SHAPE, 8, replace(model.NVLINK, link=link)) for link in (1e12, 1e11, 1e10)]
    assert times == sorted(times)
    assert times[0] < times[2]
