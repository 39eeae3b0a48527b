"""The model of the time over P ranks keeps to what has to hold of any schedule."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import rank_functions as ranks
import torch
from flash_attn_deterministic.distributed.messages.ranks import Pending, Ranks
from flash_attn_deterministic.distributed.passes import forward, gathered_backward, op_calls
from flash_attn_deterministic.distributed.planning import steps
from flash_attn_deterministic.distributed.planning.layout import dense_tokens
from flash_attn_deterministic.distributed.planning.steps import find_units
from rank_pool import pool_of
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_few_heads_leave_multiprocessors_idle() -> None:
    # Two turns of tiles of 128 rows, the second for 124 of 132; 192 rows would be 172 tiles, as
    # many turns, of which each takes 1.3 times as long.
    shape = replace(SHAPE, seqlen=32_768, nheads=4, nheads_k=1)
    rows = 4 * 8192 / 132
    assert model.busy(shape, 2, FREE, 1) == pytest.approx(rows / 1.15 / (2 * 128))
    alone = model.forward_seconds(SHAPE, 1, FREE)
    shares = [alone / 2 / model.forward_seconds(SHAPE, 2, FREE, heads) for heads in (1, 4, 8)]
    assert shares == sorted(shares)
    # Measured on two H200s, one KV head at a time: 84 % (docs/results/ranks.json).
    assert shares[0] == pytest.approx(0.86, abs=0.005)
    assert shares[1] == pytest.approx(0.94, abs=0.005)


def test_the_model_beside_two_gpus() -> None:
    """docs/distributed.md has these numbers; the runs gathered one KV head at a time."""
    record = json.loads(model.MEASURED.read_text())
    found = model.checked(record["cases"][0], record["ranks"], 1, model.NVLINK.link)
    assert [one.name for one in found] == ["ours_by_1", "ours_by_2", "ours_by_4", "ours_gathered"]
    for one in found:
        assert one.seconds == pytest.approx(one.measured_seconds, rel=0.13), one.name
        assert one.bytes == pytest.approx(one.measured_bytes, rel=0.12), one.name
    assert steps.UNIT_HEADS is None


def test_the_first_heads_are_waited_for() -> None:
    slow = replace(model.NVLINK, link=1e6, latency=0.0)
    sent = SHAPE.keys(8) / 2 / slow.link
    assert model.forward_seconds(SHAPE, 2, slow) == pytest.approx(sent, rel=0.01)
    assert model.forward_slices(SHAPE, 0) == [slice(0, 4), slice(4, 8)]
    assert len(model.forward_slices(replace(SHAPE, seqlen=2**20), 0)) == 8


class Alone(Ranks):
    """A rank of several; what it sends goes nowhere, and what comes is not written."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Pending[torch.Tensor]:
        assert sum(sent) == rows.shape[0]
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        return Pending(self, arrived, (), what, (rows,))


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside of it."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.now: int = 0
        self.most: int = 0
        self._known = {one.untyped_storage()._cdata for one in others}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._note(one.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number in self._known:
            return
        self._known.add(number)
        self.now += size
        self.most = max(self.most, self.now)

        def freed() -> None:
            self.now -= size
            self._known.discard(number)

        weakref.finalize(storage, freed)


def _forward_call(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _backward_call(
    rows: op_calls.Rows, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    sums = rows.q.new_empty(rows.q.shape, dtype=torch.float32)
    dq = torch.empty_like(rows.q)
    del sums
    return dq, torch.empty_like(k), torch.empty_like(v)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("nheads", "nheads_k"), [(32, 8), (8, 8), (8, 1), (10, 5)])
def test_memory_is_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch, count: int, nheads: int, nheads_k: int
) -> None:
    monkeypatch.setattr(forward, "forward_call", _forward_call)
    monkeypatch.setattr(gathered_backward, "backward_call", _backward_call)
    shape = model.Shape(2048, 1, nheads, nheads_k, 64)
    tokens = dense_tokens(1, shape.seqlen // count, count, "zigzag")
    scores = op_calls.Scores(1.0, model.CAUSAL, 0.0, 0, True, True)

    def most_of(run: Callable[..., Sequence[torch.Tensor]], heads_k: int, is_forward: bool) -> int:
        """Returns the bytes at the peak of the rank that has most."""
        found: list[int] = []
        for rank in range(count):
            q, k, v = (
                torch.empty(shape.seqlen // count, heads, shape.head_dim, dtype=torch.bfloat16)
                for heads in (nheads, nheads_k, nheads_k)
            )
            rows = op_calls.Rows(q, q, q, torch.empty(q.shape[:2]))
            given = (k, v, tokens, tokens, scores, heads_k)
            with Held(*rows, k, v) as held:
                results = run(Alone(rank, count), q if is_forward else rows, *given)
                found.append(held.most - sum(one.nbytes for one in results))
            del results
        return max(found)

    for heads_k in (0, 1, nheads_k):
        expected = model.forward_memory(shape, count, heads_k)
        assert 0.6 * expected <= most_of(forward.forward, heads_k, True) <= expected
    expected = model.memory(shape, count, 1, False)
    assert 0.6 * expected <= most_of(gathered_backward.backward, 1, False) <= 1.05 * expected
