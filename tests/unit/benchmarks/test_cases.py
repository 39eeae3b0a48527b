"""What the benchmarks time, and what they make of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from flash_attn_deterministic.verify.speed import measure

from tests.benchmarks.shared import cases
from tests.benchmarks.shared.cases import DENSE, PACKED, Case, means_to, timed


def visible(case: Case) -> int:
    """Counts the visible pairs of a small case one by one."""
    left, right = case.window
    return sum(
        (left < 0 or row - key <= left) and (right < 0 or key - row <= right)
        for length in case.lengths or [case.seqlen] * case.batch
        for row, key in itertools.product(range(length), repeat=2)
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 7, 3, 3, 8, False),
        Case(2, 7, 3, 1, 8, True),
        Case(3, 9, 2, 2, 8, True, lengths=(1, 9, 4)),
        Case(1, 30, 1, 1, 8, False, feature="window"),
        Case(1, 5, 1, 1, 8, True, feature="softcap"),
    ],
    ids=lambda case: str(case.name),
)
def test_operations_are_those_on_visible_keys(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.FEATURES, "window", {"window_size": (4, 0)})
    assert case.forward_flops == 4 * case.nheads * 8 * visible(case)
    assert case.backward_flops == 2.5 * case.forward_flops


def test_cases_cover_what_they_should() -> None:
    assert len({case.name for case in (*DENSE, *PACKED)}) == len(DENSE) + len(PACKED)
    plain = [case for case in DENSE if not case.feature and case.dtype == "bf16"]
    for head_dim in (32, 64, 96, 128, 192, 256):
        own = [case for case in plain if case.head_dim == head_dim]
        assert {case.seqlen for case in own} >= {128, 512, 1024, 4096}
        assert {case.causal for case in own} == {False, True}
        assert max(case.batch for case in own) == 256
    assert {case.nheads // case.nheads_k for case in plain} >= {1, 4, 32}
    for feature, head_dim in itertools.product(
        ("window", "softcap", "alibi", "dropout"), (64, 128)
    ):
        found = [c for c in DENSE if (c.feature, c.head_dim) == (feature, head_dim)]
        assert found
        # Upstream's local kernels have no causal mask; of the others the causal ones are built.
        assert all(case.causal == (feature != "window") for case in found)


def test_a_name_says_what_is_special() -> None:
    assert Case(4, 4096, 32, 8, 128, True, feature="alibi").name == (
        "B4 L4096 H32/8 D128 causal alibi bf16"
    )
    assert Case(2, 9, 2, 2, 64, False, lengths=(3, 9)).name == "B2 L3..9 H2 D64 bf16"


@pytest.mark.parametrize(
    ("ms", "repeats"), [(0.6, 20), (19.2, 10), (500.0, 5)], ids=["most", "budget", "least"]
)
def test_slow_calls_are_repeated_less(
    ms: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def interleaved(
        sides: Any, *, repeats: int, warmup: int, flushes: int
    ) -> dict[str, list[float]]:
        made.append(repeats)
        return {name: [ms] * repeats for name in sides}

    monkeypatch.setattr(measure, "interleaved", interleaved)
    times = timed({"ours": lambda: None, "fa2": lambda: None}, 400.0, 20)
    assert made == [2, repeats]
    assert times["fa2"] == {"median": ms, "p10": ms, "p90": ms, "repeats": repeats}


def test_means_are_by_head_dim_and_by_feature() -> None:
    def result(name: str, head_dim: int, ratio: float, feature: str = "") -> dict[str, Any]:
        own = {"name": name, "head_dim": head_dim, "feature": feature}
        return {**own, "ratio_to_fa2": ratio}

    def mean(mean: float, worst: float, case: str, cases: int) -> dict[str, Any]:
        return {"mean": mean, "worst": worst, "worst_case": case, "cases": cases}

    results = [result("a", 64, 0.5), result("b", 64, 2.0), result("c", 128, 1.0)]
    results.append(result("d", 64, 3.0, "alibi"))
    results.append({"head_dim": 128, "feature": ""})  # without the other side
    assert means_to(results, "fa2", "sdpa")["geometric_means"] == {
        "fa2": {
            "all": mean(1.0, 2.0, "b", 3),
            "D64": mean(1.0, 2.0, "b", 2),
            "D128": mean(1.0, 1.0, "c", 1),
            "alibi": mean(3.0, 3.0, "d", 1),
        }
    }
