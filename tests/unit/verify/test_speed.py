"""What is made of measured times and memory; the measuring itself needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from flash_attn_deterministic.verify import limits
from flash_attn_deterministic.verify.contract import Attention
from flash_attn_deterministic.verify.shared import timing as measure
from flash_attn_deterministic.verify.speed import backward, decode, seed

Calls = Mapping[str, Callable[[], object]]


class Stand:
    """Runs each call once, and says that it took what the test wants."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.peaks: list[int] = []

    def interleaved(self, calls: Calls, *, repeats: int, warmup: int = 3) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [self.ms.get(name, 1.0)] * repeats for name in calls}

    def peak_memory(self, call: Callable[[], object]) -> int:
        call()
        return self.peaks.pop(0) if self.peaks else 1000


class Upstream:
    """Stands for the library of upstream's own kernels."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
        probs = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5, -1)
        return torch.einsum("bhij,bjhd->bihd", probs, v), None

    def backward(self, *tensors: Any, **options: Any) -> Any:
        return tensors[1:4]


class Graph:
    def __init__(self, step: measure.Step) -> None:
        self.step = step

    def replay(self) -> None:
        self.step(0)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    one = Stand()
    for module in (seed, decode, backward):
        monkeypatch.setattr(module, "_DEVICE", "cpu")
        monkeypatch.setattr(module, "interleaved", one.interleaved)
    for module in (seed, backward):
        monkeypatch.setattr(module, "peak_memory", one.peak_memory)
    small = seed.Shape(1, 64, 2)
    monkeypatch.setattr(seed, "MEMORY", small)
    monkeypatch.setattr(seed, "PERFORMANCE", small)
    monkeypatch.setattr(seed, "SCALING", (small, seed.Shape(2, 64, 2)))
    monkeypatch.setattr(decode, "_QUICK", ((1, 64, 4, 2, 64), (2, 64, 4, 2, 64)))
    monkeypatch.setattr(measure, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(measure, "capture", lambda step, sets, calls: Graph(step))
    monkeypatch.setattr(backward, "_QUICK", ((1, 64, 2, 64, True),))
    return one


OURS = Attention.installed()
BASELINE: Any = Upstream()


@pytest.mark.parametrize("baseline", [None, BASELINE], ids=["alone", "with-upstream"])
def test_performance(stand: Stand, baseline: Any) -> None:
    stand.ms = {"standard": 2.0, "deterministic": 2.2, "deterministic_512": 3.0, "upstream": 2.0}
    found = seed.performance(OURS, baseline, quick=True)
    (row,) = found["rows"]
    assert row["time_ratio"]["deterministic"] == 1.1
    assert row["time_ratio"]["deterministic_512"] == 1.5
    assert row.get("ratio_to_upstream") == (1.1 if baseline else None)
    assert found["passed"] is True
    assert found["seed"] == seed.REFERENCE


def test_too_slow(stand: Stand) -> None:
    stand.ms = {"deterministic": limits.FORWARD_TIME_RATIO + 0.01}
    assert seed.performance(OURS, None, quick=True)["passed"] is False
    assert seed.scaling(OURS, None, quick=True)["passed"] is False


def test_scaling_has_a_row_for_each_shape(stand: Stand) -> None:
    found = seed.scaling(OURS, BASELINE, quick=True)
    assert [row["shape"] for row in found["rows"]] == ["B1 L64 H2 D64", "B2 L64 H2 D64"]
    assert found["passed"] is True


@pytest.mark.parametrize(
    ("ours", "passed"), [(10**8, True), (105 * 10**6 + 2**20, True), (107 * 10**6, False)]
)
def test_memory(stand: Stand, ours: int, passed: bool) -> None:
    stand.peaks = [10**8, ours, 2 * 10**8]
    found = seed.memory(OURS, None, quick=True)
    (row,) = found["rows"]
    assert found["passed"] is passed
    assert row["memory_ratio"] == {"deterministic": ours / 10**8, "deterministic_512": 2.0}
    assert "ms" not in row


def test_batch_invariance_sees_a_difference() -> None:
    def by_batch(q: torch.Tensor, *args: Any, **options: Any) -> Any:
        out = OURS.dense(q, *args, **options)
        return out + 1 if q.shape[0] == 4 else out

    broken = Attention(by_batch, OURS.varlen, OURS.kvcache, OURS.path)
    found = seed.batch_invariance(broken, None, "cpu")
    assert found["passed"] is False
    assert found["rows"][0]["differing"] > 0
    assert found["rows"][1]["side"] == "standard"
    assert seed.batch_invariance(OURS, BASELINE, "cpu")["passed"] is True


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_batch_invariance_of_what_is_no_number(value: float) -> None:
    """The bits of two NaN are equal."""

    def infinite(*args: Any, **options: Any) -> Any:
        return torch.full_like(OURS.dense(*args, **options), value)

    found = seed.batch_invariance(
        Attention(infinite, OURS.varlen, OURS.kvcache, OURS.path), None, "cpu"
    )
    assert found["passed"] is False
    assert (found["rows"][0]["differing"], found["rows"][0]["finite"]) == (0, False)
    assert "not all numbers are finite" in found["rows"][0]["words"]


@pytest.mark.parametrize("baseline", [None, BASELINE], ids=["alone", "with-upstream"])
def test_decode(stand: Stand, baseline: Any) -> None:
    stand.ms = {"standard": 8.0, "deterministic": 10.0, "copy": 8.0, "upstream": 8.0}
    assert limits.DECODE_TIME_RATIO == 1.25
    found = decode.measure(OURS, baseline, quick=True)
    assert found["geometric_mean"] == 1.25
    for row in found["rows"]:
        # Times are of a graph with eight calls.
        assert row["ms"]["deterministic"]["median"] == 1.25
        assert row["floor_ms"] == 0.5
        assert row["ratio_to_floor"] == 2.5
        assert row.get("ratio_to_upstream") == (1.25 if baseline else None)
    assert found["passed"] is True
    stand.ms["deterministic"] = 10.1
    assert decode.measure(OURS, baseline, quick=True)["passed"] is False


@pytest.mark.parametrize("baseline", [None, BASELINE], ids=["alone", "with-upstream"])
def test_backward(stand: Stand, baseline: Any) -> None:
    stand.ms = {"standard": 2.0, "deterministic": 2.2, "upstream": 2.0}
    found = backward.measure(OURS, baseline, quick=True)
    (row,) = found["rows"]
    assert row["time_ratio"] == 1.1
    assert row.get("ratio_to_upstream") == (1.1 if baseline else None)
    assert found["passed"] is True
    assert limits.BACKWARD_TIME_RATIO == 1.2
    stand.ms = {"standard": 2.0, "deterministic": 2.41}
    assert backward.measure(OURS, baseline, quick=True)["passed"] is False


def test_summary() -> None:
    assert measure.summary([1.0, 2.0, 3.0]) == {"median": 2.0, "p10": 1.2, "p90": 2.8}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_time_that_is_no_number_is_within_no_limit(stand: Stand, value: float) -> None:
    assert not math.isfinite(measure.summary([value, 1.0, 2.0])["median"])
    stand.ms = {"deterministic": value}
    assert seed.performance(OURS, None, quick=True)["passed"] is False
    assert decode.measure(OURS, None, quick=True)["passed"] is False
    assert backward.measure(OURS, None, quick=True)["passed"] is False
