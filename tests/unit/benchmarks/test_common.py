"""The loop that the benchmark scripts share."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.shared.run import open_baseline, run_cases


@dataclass(frozen=True)
class Case:
    name: str


CASES = (Case("B1 good"), Case("B2 bad"), Case("B3 absent"), Case("C4 good"))


def result(case: Case) -> dict[str, Any]:
    if "bad" in case.name:
        raise RuntimeError("no kernel image")
    return {"name": case.name, "ms": {"ours": {"median": 1.5}}}


def run(out: Path, record: dict[str, Any], only: str = "", **options: Any) -> int:
    return run_cases(
        argparse.Namespace(out=out, only=[only], seconds=math.inf),
        record,
        CASES,
        built=lambda case: "absent" not in case.name,
        measure=result,
        **options,
    )


def test_failures_are_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    record: dict[str, Any] = {"cases": [], "failed": []}
    assert run(tmp_path / "out.json", record) == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in written["cases"]] == ["B1 good", "C4 good"]
    assert written["failed"] == [
        {"name": "B2 bad", "error": "RuntimeError: no kernel image"},
        {"name": "B3 absent", "error": "not in this wheel"},
    ]


def test_a_broken_gpu_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    record: dict[str, Any] = {"cases": [], "failed": []}
    assert run(tmp_path / "out.json", record) == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in written["cases"]] == ["B1 good"]
    assert written["left_out"] == ["B3 absent", "C4 good"]


def test_a_part_of_the_names_picks_cases(tmp_path: Path) -> None:
    record: dict[str, Any] = {"cases": [], "failed": []}
    assert run(tmp_path / "out.json", record, only="C4") == 0
    assert [case["name"] for case in record["cases"]] == ["C4 good"]


def test_what_was_measured_before_a_cut_is_on_disk(tmp_path: Path) -> None:
    seen = []

    def cut(results: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append((tmp_path / "out.json").exists())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return {"count": len(results)}

    record: dict[str, Any] = {"cases": [], "failed": []}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out.json", record, summarise=cut)
    assert seen == [False, True]
    written = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in written["cases"]] == ["B1 good"]
    assert written["count"] == 1


def test_a_baseline_that_does_not_load_is_a_failure_of_its_own(tmp_path: Path) -> None:
    record: dict[str, Any] = {"failed": []}
    assert open_baseline(None, record) is None
    assert record == {"failed": []}
    assert open_baseline(tmp_path / "libfa2_baseline.so", record) is None
    assert record["failed"][0]["name"] == "baseline"
