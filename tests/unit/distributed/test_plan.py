"""Plans of ranks, compared with explicit masks and, for time, with the page."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from flash_attn_deterministic.distributed import model
from flash_attn_deterministic.distributed.exchange import Places, stream_of
from flash_attn_deterministic.distributed.layout import layout_of, tokens_of
from flash_attn_deterministic.distributed.plan import (
    Call,
    Mask,
    Pass,
    Plan,
    Shape,
    _planner_of,
    plan_of,
)
from flash_attn_deterministic.distributed.sums import added

MASKS = {
    "full": Mask(-1, -1),
    "causal": Mask(-1, 0),
    "window": Mask(5, 3),
    "left": Mask(4, -1),
    "right": Mask(-1, 2),
    "narrow": Mask(0, 0),
}
# starts of q and k, ranks, order, KV heads.
CUTS: dict[str, tuple[Any, Any, int, str, int]] = {
    "contiguous": ((0, 18, 36), (0, 18, 36), 3, "contiguous", 3),
    "zigzag": ((0, 12, 24), (0, 12, 24), 3, "zigzag", 3),
    "one": ((0, 36), (0, 36), 3, "zigzag", 1),
    "more keys": ((0, 12), (0, 32), 4, "contiguous", 2),
    "more queries": ((0, 32), (0, 8), 4, "zigzag", 4),
    "packed": ((0, 3, 3, 20, 23), (0, 5, 6, 19, 24), 3, "contiguous", 1),
    "short": ((0, 40, *range(44, 73, 4)), (0, 40, *range(44, 73, 4)), 2, "zigzag", 1),
}


def _shape(cut: tuple[Any, Any, int, str, int], mask: Mask, **options: Any) -> Shape:
    starts_q, starts_k, ranks, order, heads = cut
    tokens = (-(-starts[-1] // ranks) for starts in (starts_q, starts_k))
    return Shape(
        *(starts_q, starts_k, False, *tokens, ranks, order, *mask),
        **{"align": 4, "chunk": 4, "nheads": heads, "nheads_k": heads, "head_dim": 64, **options},
    )


def _seen(starts_q: Any, starts_k: Any, mask: Mask) -> set[tuple[int, int]]:
    """Returns the pairs of a row and a key, as tokens, by the definition."""
    seen = set()
    for (q, q_end), (k, k_end) in zip(
        itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True
    ):
        for row, key in itertools.product(range(q, q_end), range(k, k_end)):
            after = (key - k_end) - (row - q_end)
            if (mask.left < 0 or after >= -mask.left) and (mask.right < 0 or after <= mask.right):
                seen.add((row, key))
    return seen


def _rows(places: Places, rank: int, last: int) -> dict[int, torch.Tensor]:
    """Returns the rows of each rank; this rank's are the last or the first ones."""
    others = [other for other in range(len(places.counts)) if other != rank]
    order = [*others, rank] if last == rank else [rank, *others]
    own = places.total - places.others
    counts = [own if other == rank else places.counts[other] for other in order]
    rows = torch.split_with_sizes(places.index(stream_of(torch.device("cpu"))), counts)
    return dict(zip(order, rows, strict=True))


def _tokens(shape: Shape, plan: Plan, part: Pass, rank: int) -> tuple[list[int], list[int]]:
    """Returns which tokens the rows and the keys of a pass are; -1: none."""
    found = []
    layouts = shape.layouts()
    for side, (way, layout, own) in enumerate(
        zip((part.rows, part.keys), layouts, (shape.tokens_q, shape.tokens_k), strict=True)
    ):
        every = [tokens_of(layout, by, own) for by in range(shape.ranks)]
        if way is None:
            found.append(every[rank].tolist() if side == 0 else [])
            continue
        here = torch.full((way.room,), -1)
        for by in range(shape.ranks):
            other = plan_of(shape, by)
            back = (other.forward, other.backward)[part is plan.backward]
            sent = (back.rows, back.keys)[side]
            assert sent is not None
            leaving = _rows(sent.sent, by, last=by)[rank] // sent.sent.parts
            here[_rows(way.received, rank, last=-1)[by]] = every[by][leaving]
        found.append(here.tolist())
    return found[0], found[1]


def _pairs(call: Call, rows: list[int], keys: list[int]) -> list[tuple[int, int]]:
    return [
        (rows[call.rows.start + row], keys[call.keys.start + key])
        for row, key in _seen(call.starts_q, call.starts_k, call.mask)
    ]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("degree", [0, 1])
def test_each_pair_is_computed_once(
    cut: tuple[Any, Any, int, str, int], mask: Mask, degree: int
) -> None:
    shape = _shape(cut, mask, degree=degree)
    expected = _seen(*cut[:2], mask)
    for backward in (False, True):
        found: list[tuple[int, int]] = []
        for rank in range(shape.ranks):
            plan = plan_of(shape, rank)
            part = plan.backward if backward else plan.forward
            own = (
                tokens_of(layout, rank, tokens).tolist()
                for layout, tokens in zip(
                    shape.layouts(), (shape.tokens_q, shape.tokens_k), strict=True
                )
            )
            if rank % plan.chosen.ulysses_degree:  # another one has other heads of these rows
                continue
            for call in plan.local:
                found += _pairs(call, *own)
            rows, keys = _tokens(shape, plan, part, rank)
            for call in (*part.calls, *part.runs):
                assert len(call.starts_q) == 2 or call in part.calls
                found += _pairs(call, rows, keys)
        assert len(found) == len(set(found))
        # Gaps are never seen, and so are no tokens.
        assert set(found) == expected


def test_only_keys_in_the_window_travel() -> None:
    for mask, tokens in ((Mask(5, 0), [0, 5, 5, 5]), (Mask(-1, -1), [192] * 4)):
        shape = _shape(((0, 256), (0, 256), 4, "contiguous", 1), mask)
        ways = [plan_of(shape, rank).forward.keys for rank in range(4)]
        assert [way and way.received.others for way in ways] == tokens


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_keys_get_the_sums_of_all_chunks_that_see_them(mask: Mask) -> None:
    shape = _shape(((0, 38), (0, 38), 2, "contiguous", 1), mask)
    plans = [plan_of(shape, rank) for rank in range(2)]
    # The sums of a run are a power of two, on all keys: totals tell which runs were added.
    rows_of: list[set[int]] = []
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for rank, plan in enumerate(plans):
        rows, _ = _tokens(shape, plan, plan.backward, rank)
        for run in plan.backward.runs:
            one = torch.full((run.keys.stop - run.keys.start, 1, 1), 2.0 ** len(rows_of))
            found[rank].append((one, -one))
            rows_of.append(set(rows[run.rows]))
    assert sum(map(len, rows_of)) == len(set.union(*rows_of))
    messages = []
    for plan, runs in zip(plans, found, strict=True):
        sums = plan.backward.sums
        assert sums is not None
        data = [runs[run][side][keys] for run, keys in sums.sent for side in (0, 1)]
        message = torch.cat([torch.zeros(0, 1, 1), *data])
        messages.append(message.split_with_sizes(sums.counts[0]))
    seen = _seen((0, 38), (0, 38), mask)
    for rank, (plan, runs) in enumerate(zip(plans, found, strict=True)):
        sums = plan.backward.sums
        assert sums is not None
        arrived = torch.cat([message[rank] for message in messages])
        assert [len(message[rank]) for message in messages] == sums.counts[1]
        dk, dv = added(sums, arrived, runs).view(2, -1)
        assert torch.equal(dk, -dv)
        keys = [key + 19 * rank for place in sums.keys for key in range(19)[place]]
        for key, total in zip(keys, dk.tolist(), strict=True):
            some = [rows for n, rows in enumerate(rows_of) if int(total) >> n & 1]
            assert {row for row, other in seen if other == key} <= set.union(*some)
        assert {key for _, key in seen if key // 19 == rank} <= set(keys)


def test_a_sequence_of_one_chunk_on_several_ranks_is_a_run() -> None:
    """Its dk and dv travel as sums, and not as those of a whole sequence too."""
    shape = _shape(((0, 4, 16), (0, 4, 16), 2, "contiguous", 1), Mask(-1, 0), chunk=12)
    parts = [plan_of(shape, rank).backward for rank in range(2)]
    assert [(part.calls, part.whole, part.sums is None) for part in parts] == [
        ((), None, False)
    ] * 2
    (run,) = (run for part in parts for run in part.runs)
    assert run.starts_q == (0, 12)


def test_choices() -> None:
    """What is chosen for sizes that people have."""

    def plan(lengths: list[int], ranks: int, heads: int, mask: Mask, order: str) -> Plan:
        starts = (0, *itertools.accumulate(lengths))
        cut = starts, starts, ranks, order, heads
        return plan_of(_shape(cut, mask, align=2048, chunk=4096, nheads=4 * heads, head_dim=128), 0)

    causal = Mask(-1, 0)
    # measured: by 4 % faster than 2
    assert plan([65536], 2, 8, causal, "zigzag").chosen.ulysses_degree == 1
    assert plan([2**20], 64, 8, causal, "zigzag").chosen.ulysses_degree == 8
    assert plan([65536], 8, 1, causal, "zigzag").chosen.ulysses_degree == 1
    assert plan([131072], 2, 8, Mask(4096, 0), "contiguous").chosen.ulysses_degree == 1
    short = plan([1024] * 1024, 8, 1, causal, "zigzag")
    assert (short.chosen.whole_sequences, short.backward.runs) == (1024, ())
    assert (len(short.forward.calls), len(short.backward.calls)) == (1, 1)


def test_planning_takes_a_few_milliseconds() -> None:
    starts = tuple(range(0, 1024 * 1024 + 1, 1024))
    shape = _shape((starts, starts, 8, "zigzag", 1), Mask(-1, 0), align=2048, chunk=4096)
    plan_of(shape, 0)
    seconds = []
    for _ in range(5):
        plan_of.cache_clear()
        _planner_of.cache_clear()
        begin = time.thread_time()
        plan_of(shape, 0)
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 0.03


def test_layouts() -> None:
    layout = layout_of((0, 3, 7), 4, 2, "contiguous", "q")
    assert [tokens_of(layout, rank, 4).tolist() for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    layout = layout_of((0, 4, 12), 6, 2, "zigzag", "q")
    found = [tokens_of(layout, rank, 6).tolist() for rank in range(2)]
    assert found == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]


def test_the_model_overlaps_messages() -> None:
    load = model.Load(1e9, 32, 8, 128, 0, 65536, 65536, 0, 2)
    whole, steps = (model.seconds(load, True, heads, model.NETWORK) for heads in (8, 1))
    come, go = (part / model.NETWORK.bandwidth for part in load.bytes(True))
    assert whole > steps > whole - come - go
    assert model.best_heads(load, True, model.NETWORK, 65536) < 8
    nothing = load._replace(moved_k=0, sums=0)
    assert model.best_heads(nothing, True, model.NETWORK, 65536) == 8
