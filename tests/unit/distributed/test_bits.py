"""Attention over ranks against one device, bit for bit, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import rank_functions as ranks
from flash_attn_deterministic.verify.ranks.cases import CPU_QUICK, Case, cases_of
from rank_pool import Pool, pool_of

PACKED: dict[str, Any] = {"packed": True, "head_dim": 16}
CASES = {
    # Borders one token around a block of keys and rows; lengths that no block divides.
    "border-63": Case(2, lengths_q=(126,), lengths_k=(126,)),
    "border-65": Case(2, lengths_q=(130,), lengths_k=(130,), mask="full"),
    "border-127": Case(2, lengths_q=(254,), lengths_k=(254,), head_dim=8),
    "border-129": Case(2, lengths_q=(258,), lengths_k=(258,), head_dim=8),
    "zigzag-33": Case(3, order="zigzag", lengths_q=(198,), lengths_k=(198,), head_dim=16),
    "four-65": Case(4, lengths_q=(260,), lengths_k=(260,), head_dim=8),
    "batch-of-3": Case(4, order="zigzag", lengths_q=(72,) * 3, lengths_k=(72,) * 3, head_dim=8),
    # Another number of queries than keys, either way; some rows then see nothing.
    "few-queries": Case(3, lengths_q=(6,), lengths_k=(150,)),
    "few-keys": Case(3, lengths_q=(150,), lengths_k=(36,)),
    "few-keys-zigzag": Case(3, order="zigzag", lengths_q=(150,), lengths_k=(36,)),
    "few-keys-window": Case(2, lengths_q=(150,), lengths_k=(36,), mask="window-causal"),
    "no-queries": Case(2, lengths_q=(0,), lengths_k=(20,)),
    "no-keys": Case(2, lengths_q=(20,), lengths_k=(0,), mask="full"),
    "no-queries-heads": Case(2, degree=2, lengths_q=(0,), lengths_k=(20,)),
    # Splits of another size than blocks, one split, one head for all queries.
    "split-192": Case(2, lengths_q=(500,), lengths_k=(500,), split_size=192, head_dim=8),
    "one-split": Case(2, lengths_q=(130,), lengths_k=(130,), split_size=0, mask="window"),
    "one-kv-head": Case(3, lengths_q=(90,), lengths_k=(90,), nheads=8, nheads_k=1),
    "padded-head-dim": Case(2, lengths_q=(40,), lengths_k=(40,), head_dim=20, dtype="fp16"),
    # A window within a rank, one over two borders.
    "narrow-window": Case(4, lengths_q=(400,), lengths_k=(400,), mask="window-causal", head_dim=8),
    "wide-window": Case(4, order="zigzag", lengths_q=(160,), lengths_k=(160,), mask="window",
        head_dim=8),
    # One sequence over all ranks and parts of others; sequences that end at a border; tokens of
    # no sequence.
    "packed-over-all": Case(4, lengths_q=(5, 70, 5), lengths_k=(5, 70, 5), **PACKED),
    "packed-at-borders": Case(4, lengths_q=(20, 20, 40), lengths_k=(20, 20, 40), **PACKED),
    "packed-unlike": Case(2, lengths_q=(3, 0, 31), lengths_k=(40, 8, 2), mask="full", **PACKED),
    "packed-3": Case(3, lengths_q=(5, 64, 3), lengths_k=(5, 64, 3), **PACKED),
    "packed-window": Case(3, lengths_q=(100, 1, 199), lengths_k=(100, 1, 199), mask="window",
        **PACKED),
    # Heads divided over all ranks and over some; sequences of which each comes to one rank.
    "heads": Case(4, degree=4, lengths_q=(40,), lengths_k=(40,), nheads=8, nheads_k=4),
    "both": Case(4, degree=2, order="zigzag", lengths_q=(144,) * 2, lengths_k=(144,) * 2),
    "both-one": Case(4, degree=2, order="zigzag", lengths_q=(144,), lengths_k=(144,)),
    "both-packed": Case(4, degree=2, lengths_q=(9, 71), lengths_k=(9, 71), **PACKED),
    "whole-sequences": Case(4, degree=1, lengths_q=(40,) * 8, lengths_k=(40,) * 8, head_dim=8),
    "whole-and-cut": Case(2, degree=1, order="zigzag", mask="window-causal",
        lengths_q=(400, *(8,) * 30), lengths_k=(400, *(8,) * 30), **PACKED),
    "one-head-a-step": Case(2, heads_k=1, lengths_q=(80,), lengths_k=(80,), nheads=8, nheads_k=4),
    "three-of-four": Case(2, degree=1, heads_k=3, lengths_q=(80,), lengths_k=(80,), nheads=8,
        nheads_k=4),
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pool_of(4) as four:
        yield four


def test_cases_equal_one_device(pool: Pool) -> None:
    names = list(CASES)
    # A few at a time: a pool waits for an answer for two minutes.
    for some in (names[at : at + 8] for at in range(0, len(names), 8)):
        for found in pool.run(ranks.outcomes, [CASES[name] for name in some]):
            assert dict(zip(some, found, strict=True)) == {name: {} for name in some}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_cases_of_the_contract_equal_one_device(pool: Pool, count: int) -> None:
    cases = [case for index, case in enumerate(cases_of(count, CPU_QUICK)) if index % 3 == 0]
    found = pool.run(ranks.outcomes, cases)[0]
    assert [case.name for case, bad in zip(cases, found, strict=True) if bad] == []
    assert len(cases) > 8


@pytest.mark.parametrize(
    ("what", "mask", "result"),
    [("sums", "causal", "dk"), ("rounded sums", "full", "dv"), ("alignment", "window", "out")],
)
def test_differences_are_found(pool: Pool, what: str, mask: str, result: str) -> None:
    case = Case(2, mask=mask, lengths_q=(260,), lengths_k=(260,), nheads=3, nheads_k=1)
    assert pool.run(ranks.outcomes, [case])[0] == [{}]
    found = pool.run(ranks.outcome_without, case, what)[0]
    assert result in {name for differing in found.values() for name in differing}


@pytest.mark.parametrize(("degree", "messages"), [(1, (1, 2)), (2, (2, 2))])
def test_a_step_has_few_messages(pool: Pool, degree: int, messages: tuple[int, int]) -> None:
    """Rows and keys, results; keys, sums; rows and keys, gradients."""
    assert pool.run(ranks.messages_of, 2, degree)[:2] == [messages] * 2


def _name_of(function: Any) -> str:
    return str(function.__name__)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "function",
    [ranks.with_more_of_a_call, ranks.with_sinks_packed, ranks.with_uneven_lengths],
    ids=_name_of,
)
def test_sinks_two_head_dims_and_uneven_lengths(pool: Pool, function: Any, count: int) -> None:
    for found in pool.run(function, count)[:count]:
        assert found
        assert all(found), found


@pytest.mark.parametrize("function", [ranks.checkpointed, ranks.compiled], ids=_name_of)
def test_with_features_of_torch(pool: Pool, function: Any) -> None:
    assert pool.run(function, 2)[:2] == [[True] * 4] * 2


def test_in_context_parallel(pool: Pool) -> None:
    assert pool.run(ranks.in_context_parallel) == [[True] * 6] * 4


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dtensors_of_two_dimensions(pool: Pool, packed: bool) -> None:
    assert pool.run(ranks.with_dtensors, packed) == [[True] * 4] * 4


def test_q_k_and_v_in_one_tensor(pool: Pool) -> None:
    assert pool.run(ranks.packed_in_one) == [[True] * 4] * 4


@pytest.mark.parametrize("degree", [1, 2])
def test_memory_goes_back_without_the_garbage_collector(pool: Pool, degree: int) -> None:
    assert pool.run(ranks.kept_by_cycles, degree) == [[]] * 4


@pytest.mark.parametrize("degree", [1, 2])
def test_tensors_that_arrive_are_not_copied(pool: Pool, degree: int) -> None:
    assert pool.run(ranks.misaligned, degree) == [[]] * 4


def test_explain(pool: Pool) -> None:
    for dense, packed in pool.run(ranks.explained, 2)[:2]:
        assert dense.ulysses_degree == 2
        assert min(dense.seconds) > 0
        assert packed.ulysses_degree == 1
        assert packed.whole_sequences == 0  # each is on one rank already
        assert packed.others == {}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("copied", [False, True], ids=["prepared", "copied"])
def test_llama3_of_ring_flash_attn(pool: Pool, causal: bool, copied: bool) -> None:
    for found in pool.run(ranks.as_llama3, 3, causal, copied)[:3]:
        assert found == [True] * 4


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_zigzag_ring_of_ring_flash_attn(pool: Pool, packed: bool) -> None:
    for size in (2, 3):
        for found in pool.run(ranks.as_zigzag_ring, size, packed)[:size]:
            assert found == [True] * 4
