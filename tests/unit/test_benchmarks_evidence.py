"""The command that takes every measurement again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import evidence
from tests.benchmarks.evidence import LANES, RECORD, STEPS, Step, install, run_all, words_of

GIVEN = {"wheel": "/w.whl", "out": "/out", "fa3": None, "fa4": None, "baseline": None}
SOURCES = {"cpp": "a", "cmake": "b"}


def test_an_option_without_a_value_is_left_out() -> None:
    command = '-m x --fa3 {fa3} --wheel {wheel} -m "not slow"'
    assert words_of(command, GIVEN) == ["-m", "x", "--wheel", "/w.whl", "-m", "not slow"]
    with_fa3 = words_of(command, {**GIVEN, "fa3": "/f"})
    assert with_fa3[2:4] == ["--fa3", "/f"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_names_something_that_exists(step: Step) -> None:
    words = words_of(step.command, GIVEN)
    assert step.lane in LANES
    assert not any("{" in word or "}" in word for word in words)
    place = words.index("-m") + 1 if "-m" in words else 0
    modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"]
    for module in modules:
        if module.startswith("tests."):
            path = evidence.ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    if not modules:
        assert (evidence.ROOT / words[place]).exists()


def started(out: Path) -> Path:
    out.mkdir()
    (out / RECORD).write_text(json.dumps({"sources": SOURCES}))
    return out


def python(name: str, lane: str, code: str, limit: int = 60) -> Step:
    return Step(name, lane, limit, f'-c "{code}"', f"{name}.json")


@pytest.mark.parametrize("gpus", [1, 2])
def test_steps_run_and_fail_alone(tmp_path: Path, gpus: int) -> None:
    out = started(tmp_path / "out")
    steps = (
        python("good", "times", "print('3 passed, 2 skipped in 1s')"),
        python("bad", "tests", "import sys; sys.exit(4)"),
        python("long", "tests", "import time; time.sleep(60)", limit=1),
        python("both", "together", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"),
    )
    found = {one.name: one for one in run_all(steps, GIVEN, gpus, out)}
    assert set(found) == {"good", "bad", "long"} | ({"both"} if gpus == 2 else set())
    assert found["good"].counts == {"passed": 3, "skipped": 2}
    assert [found[name].status for name in ("good", "bad", "long")] == [0, 4, None]
    recorded = json.loads((out / RECORD).read_text())
    assert {one["name"] for one in recorded["steps"]} == set(found)
    assert recorded["sources"] == SOURCES


def test_results_of_other_kernels_are_not_installed(tmp_path: Path) -> None:
    out = started(tmp_path / "out")
    with pytest.raises(ValueError, match="cpp differ"):
        install(out, tmp_path, {**SOURCES, "cpp": "other"})


def test_what_ended_is_installed(tmp_path: Path) -> None:
    out, results = started(tmp_path / "out"), tmp_path / "results"
    results.mkdir()
    steps: list[dict[str, Any]] = [
        {"name": "forward", "status": 0},
        {"name": "backward", "status": None},
        {"name": "bench", "status": 1},
        {"name": "decode", "status": 0},  # which left no file
    ]
    (out / RECORD).write_text(json.dumps({"sources": SOURCES, "steps": steps}))
    for name in ("forward.json", "backward.json"):
        (out / name).write_text("{}")
    (out / "bench").mkdir()
    (out / "bench" / "bench.json").write_text("{}")
    assert install(out, results, SOURCES) == ["forward.json", "bench"]
    assert sorted(path.name for path in results.iterdir()) == ["bench", "forward.json", RECORD]
    assert (results / "bench" / "bench.json").exists()
