"""What is made of measured times and memory; the measuring itself needs a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_attn_deterministic.build_info import build_info
from flash_attn_deterministic.verify import speed
from flash_attn_deterministic.verify.contract import Attention
from flash_attn_deterministic.verify.shared import timing

from verify.samples import cuda_run

Calls = Mapping[str, Callable[[], object]]
OURS = Attention.installed()
SECTIONS = ["forward", "decode", "backward"]


class Stand:
    """Runs each call once, and says that it took what the test wants."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.peaks: list[int] = []
        self.last: dict[str, float] = {}

    def interleaved(self, calls: Calls, *, repeats: int, warmup: int = 3) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [self.ms.get(name, 1.0)] * repeats for name in calls}

    def peak_memory(self, call: Callable[[], object]) -> int:
        call()
        return self.peaks.pop(0) if self.peaks else 1000


class Graph:
    def __init__(self, step: timing.Step) -> None:
        self.step = step

    def replay(self) -> None:
        self.step(0)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    one = Stand()
    monkeypatch.setattr(speed, "_DEVICE", "cpu")
    monkeypatch.setattr(speed, "interleaved", one.interleaved)
    monkeypatch.setattr(speed, "peak_memory", one.peak_memory)
    monkeypatch.setattr(speed, "last_ratios", lambda section: one.last)
    small = speed.Shape(1, 64, 4, 2, 64)
    monkeypatch.setattr(speed, "SHAPES", dict.fromkeys(SECTIONS, (small,)))
    monkeypatch.setattr(timing, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(timing, "capture", lambda step, sets, calls: Graph(step))
    return one


SMALL = "B1 L64 H4/2 D64 bf16"


@pytest.mark.parametrize(
    ("section", "ms", "passed"),
    [("forward", 1.07, True), ("decode", 1.09, False), ("backward", 1.09, False)],
)
def test_times_are_bound_by_the_last_release(
    section: str, ms: float, passed: bool, stand: Stand
) -> None:
    stand.ms, stand.last = {"standard": 2.0, "ours": ms}, {SMALL: 0.5}
    found = speed.measure(section, OURS, quick=True)
    (row,) = found["rows"]
    assert row["shape"] == SMALL
    assert (row["time_ratio"], row["last_ratio"], row["limit"]) == (ms / 2, 0.5, 0.54)
    assert found["passed"] is passed
    assert found["geometric_mean"] == ms / 2


def test_without_a_release_on_this_kind_of_gpu_times_are_shown_only(stand: Stand) -> None:
    stand.ms = {"standard": 2.0, "ours": 9.0}
    found = speed.measure("forward", OURS, quick=False)
    (row,) = found["rows"]
    assert (row["time_ratio"], row["limit"], found["passed"]) == (4.5, None, True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_time_that_is_no_number_passes_nothing(value: float, stand: Stand) -> None:
    stand.ms = {"ours": value}
    assert speed.measure("forward", OURS, quick=True)["passed"] is False


@pytest.mark.parametrize("section", ["forward", "backward"])
@pytest.mark.parametrize(
    ("ours", "passed"), [(10**8, True), (105 * 10**6 + 2**20, True), (107 * 10**6, False)]
)
def test_memory(section: str, ours: int, passed: bool, stand: Stand) -> None:
    order = [10**8, ours] if section == "forward" else [ours, 10**8]
    stand.peaks = list(order)
    found = speed.measure(section, OURS, quick=True)
    assert found["passed"] is passed
    assert found["rows"][0]["memory_ratio"] == ours / 10**8


def test_decode_is_compared_with_reading_the_cache(stand: Stand) -> None:
    stand.ms = {"standard": 8.0, "ours": 10.0, "copy": 8.0}
    (row,) = speed.measure("decode", OURS, quick=True)["rows"]
    assert row["ms"]["ours"]["median"] == 1.25  # of a graph with eight calls
    assert row["ratio_to_floor"] == 2.5


def test_noise_widens_the_limit_as_its_medians_explain() -> None:
    quiet = {"ours": {"median": 1.0, "p10": 1.0, "p90": 1.0}}
    quiet["standard"] = quiet["ours"]
    assert speed.limit_of(0.5, quiet, 15) == 0.5 * speed.TIME_RATIO
    noisy = {**quiet, "ours": {"median": 1.0, "p10": 0.9, "p90": 1.1}}
    few, many = (speed.limit_of(0.5, noisy, n) for n in (4, 100))
    assert few is not None
    assert many is not None
    assert 0.54 < many < few < 0.6
    assert speed.limit_of(None, noisy, 4) is None


def test_every_shape_of_the_last_release_is_bound() -> None:
    for record in json.loads(speed.LAST.read_text(encoding="utf-8")).values():
        assert len(record["wheel"]["sha256"]) == 64
        for section, shapes in speed.SHAPES.items():
            assert record["ratios"][section].keys() == {shape.name for shape in shapes}


def test_ratios_are_those_of_the_gpu_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert speed.last_ratios("forward").keys() == {one.name for one in speed.SHAPES["forward"]}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H800")
    assert speed.last_ratios("forward") == {}

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    ptx = replace(build_info(), architectures=("80-virtual",))
    monkeypatch.setattr(speed, "build_info", lambda: ptx)
    assert speed.last_ratios("forward") == {}


def test_a_report_becomes_the_last_release(tmp_path: Any) -> None:
    (found,) = speed.release(cuda_run(tmp_path).record()).items()
    assert (found[0], found[1]["version"]) == ("NVIDIA H200", "0.1.0")
    assert found[1]["ratios"]["decode"]["B8 L4096 H32/8 D128 bf16"] == 1.11
    assert found[1]["ratios"].keys() == set(SECTIONS)


def test_summary() -> None:
    assert timing.summary([1.0, 2.0, 3.0]) == {"median": 2.0, "p10": 1.2, "p90": 2.8}
    assert not math.isfinite(timing.summary([math.nan, 1.0, 2.0])["median"])
