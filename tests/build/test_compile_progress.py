from __future__ import annotations

import json
from pathlib import Path

import pytest
from flash_attn_build import files
from flash_attn_build.compile import build_folder

MEASURED = {"large.o": 90.0, "small.o": 10.0}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build folder below a source tree, in which CMake has written its list of units."""
    folder = tmp_path / "build"
    files.write_json(folder / "compile_commands.json", [{"output": name} for name in MEASURED])
    units = [{"output": name, "cpu_seconds": seconds} for name, seconds in MEASURED.items()]
    files.write_json(tmp_path / "docs/results/build.json", {"translation_units": units})
    return folder


def add(build: Path, name: str, seconds: float) -> None:
    record = {"output": name, "cpu_seconds": seconds}
    files.write_json(build / build_folder.LOGS / f"{name}.json", record)


def minutes(build: Path) -> tuple[str, str]:
    """CPU-minutes done and left."""
    words = build_folder.progress(build, 2, 0, build.parent).split()
    return words[5], words[8]


def test_the_line_counts_units_of_this_build(build: Path) -> None:
    add(build, "small.o", 20)
    commands = build / "compile_commands.json"
    assert build_folder.progress(build, 2, 0, build.parent) == (
        "1 of 2 translation units, 0.3 CPU-minutes; about 3.0 CPU-minutes left, 2 minutes on 2 "
        "cores"
    )
    assert build_folder.progress(build, 2, 0, build) == ""  # nothing was measured
    # The list of an earlier configuration.
    later = commands.stat().st_mtime + 1
    assert build_folder.progress(build, 2, later, build.parent) == ""
    commands.unlink()  # CMake has written nothing yet
    assert build_folder.progress(build, 2, 0, build.parent) == ""


def test_what_is_left_follows_the_measured_costs(build: Path) -> None:
    assert minutes(build) == ("0.0", "1.7")
    add(build, "small.o", 10)
    assert minutes(build) == ("0.2", "1.5")
    add(build, "small.o", 20)  # this machine takes twice as long
    assert minutes(build) == ("0.3", "3.0")
    add(build, "large.o", 100)
    assert minutes(build) == ("2.0", "0.0")


def test_units_that_were_not_measured_count_as_the_mean(build: Path) -> None:
    names = [*MEASURED, "new.o"]
    files.write_json(build / "compile_commands.json", [{"output": name} for name in names])
    assert minutes(build) == ("0.0", "2.5")
    add(build, "of another configuration.o", 70)
    assert minutes(build) == ("0.0", "2.5")


def test_measured_costs_are_those_of_the_release_build(build: Path) -> None:
    recorded = json.loads((files.ROOT / "docs" / "results" / "build.json").read_text())
    commands = [{"output": unit["output"]} for unit in recorded["translation_units"]]
    files.write_json(build / "compile_commands.json", commands)
    expected = f"about {recorded['totals']['cpu_seconds'] / 60:.1f} CPU-minutes left"
    assert expected in build_folder.progress(build, 2, 0)
