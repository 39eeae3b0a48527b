from __future__ import annotations

import json
from pathlib import Path

import pytest
from flash_attn_build.compile import build_folder, progress

ROOT = Path(__file__).resolve().parents[2]
MEASURED = {"large.o": 90.0, "small.o": 10.0}


def test_what_is_left_follows_the_measured_costs() -> None:
    assert progress.left(MEASURED, {}, MEASURED) == (0, 100)
    assert progress.left(MEASURED, {"small.o": 10}, MEASURED) == (10, 90)
    # This machine takes twice as long.
    assert progress.left(MEASURED, {"small.o": 20}, MEASURED) == (20, 180)
    assert progress.left(MEASURED, {"small.o": 9, "large.o": 99}, MEASURED) == (108, 0)


def test_units_that_were_not_measured_count_as_the_mean() -> None:
    outputs = [*MEASURED, "new.o"]
    assert progress.left(outputs, {}, MEASURED) == (0, 150)
    assert progress.left(outputs, {"of another configuration.o": 7}, MEASURED) == (0, 150)


def test_the_line_counts_units_of_this_build(tmp_path: Path) -> None:
    assert progress.line(tmp_path, 2, MEASURED, 0) == ""  # CMake has written nothing yet
    commands = tmp_path / "compile_commands.json"
    commands.write_text(json.dumps([{"output": str(tmp_path / name)} for name in MEASURED]))
    logs = build_folder.log_dir(tmp_path)
    logs.mkdir()
    (logs / "small.o.json").write_text(json.dumps({"output": "small.o", "cpu_seconds": 20}))
    assert progress.line(tmp_path, 2, MEASURED, 0) == (
        "1 of 2 translation units, 0.3 CPU-minutes; about 3.0 CPU-minutes left, 2 minutes on 2 "
        "cores"
    )
    assert progress.line(tmp_path, 2, {}, 0) == ""
    # The list of an earlier configuration.
    assert progress.line(tmp_path, 2, MEASURED, commands.stat().st_mtime + 1) == ""


def test_measured_costs_are_those_of_the_release_build(tmp_path: Path) -> None:
    assert progress.measured_seconds(tmp_path) == {}
    measured = progress.measured_seconds(ROOT)
    recorded = json.loads((ROOT / "docs" / "results" / "build.json").read_text())
    assert sum(measured.values()) == pytest.approx(recorded["totals"]["cpu_seconds"], rel=1e-3)
    assert max(measured, key=lambda name: measured[name]).endswith(".cu.o")
