"""The command that takes every measurement again."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import evidence
from tests.benchmarks.evidence import STEPS
from tests.benchmarks.shared import record as records
from tests.benchmarks.shared import steps as running
from tests.benchmarks.shared.results import (
    RECORD,
    RESULTS,
    begin,
    install,
    left_behind,
    write_outcomes,
)
from tests.benchmarks.shared.steps import LANES, ROOT, Outcome, Step, run_step, words_of

GIVEN = {"wheel": "/w.whl", "out": "/out", "fa3": None, "fa4": None, "baseline": None}
SOURCES = {"cpp": "a", "cmake": "b"}
BEGUN: dict[str, Any] = {"sources": SOURCES, "wheel": {"sha256": "1"}, "steps": []}


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
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    for word in words:
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
    if not modules:
        assert (ROOT / words[place]).exists()


def run_all(
    steps: Sequence[Step], gpus: int, out: Path, begun: dict[str, Any] = BEGUN
) -> list[Outcome]:
    return running.run_all(steps, GIVEN, gpus, out, functools.partial(write_outcomes, out, begun))


def started(out: Path) -> Path:
    out.mkdir()
    (out / RECORD).write_text(json.dumps(BEGUN))
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
    found = {one.name: one for one in run_all(steps, gpus, out)}
    assert set(found) == {"good", "bad", "long"} | ({"both"} if gpus == 2 else set())
    assert found["good"].counts == {"passed": 3, "skipped": 2}
    assert [found[name].status for name in ("good", "bad", "long")] == [0, 4, None]
    recorded = json.loads((out / RECORD).read_text())
    assert {one["name"] for one in recorded["steps"]} == set(found)
    assert recorded["sources"] == SOURCES


def test_a_step_that_may_end_too_late_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = started(tmp_path / "out")
    steps = (python("long", "times", "0", limit=50), python("short", "times", "0", limit=20))
    write = functools.partial(write_outcomes, out, BEGUN)
    found = running.run_all(steps, GIVEN, 1, out, write, seconds=40)
    assert [one.name for one in found] == ["short"]
    assert "left out, as it may take 50 s: long" in capsys.readouterr().out


def test_results_of_other_kernels_are_not_installed(tmp_path: Path) -> None:
    out = started(tmp_path / "out")
    with pytest.raises(ValueError, match="cpp differ"):
        install(out, tmp_path, {**SOURCES, "cpp": "other"}, STEPS)


def test_what_ended_is_installed(tmp_path: Path) -> None:
    out, results = started(tmp_path / "out"), tmp_path / "results"
    results.mkdir()
    steps: list[dict[str, Any]] = [
        {"name": "forward", "status": 0},
        {"name": "backward", "status": None},
        {"name": "bench", "status": 1},
        {"name": "decode", "status": 0},  # which left no file
        {"name": "varlen", "status": -9},
    ]
    (out / RECORD).write_text(json.dumps({**BEGUN, "steps": steps}))
    for name in ("forward.json", "backward.json", "varlen.json"):
        (out / name).write_text("{}")
    (out / "bench").mkdir()
    (out / "bench" / "bench.json").write_text("{}")
    assert install(out, results, SOURCES, STEPS) == ["forward.json", "bench"]
    assert sorted(path.name for path in results.iterdir()) == ["bench", "forward.json", RECORD]
    assert (results / "bench" / "bench.json").exists()


# Two children, one in a session of its own, as torchrun's are; their ids come whole or not at all.
FAMILY = """
import os, subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [subprocess.Popen(child, start_new_session=own).pid for own in (False, True)]
with open({ids!r} + ".part", "w") as file:
    file.write(" ".join(map(str, [os.getpid(), *pids])))
os.rename({ids!r} + ".part", {ids!r})
{then}
"""
WAIT = "time.sleep(600)"


def family(folder: Path, name: str, then: str, lane: str = "times", limit: int = 60) -> Step:
    script = folder / f"{name}.py"
    script.write_text(FAMILY.format(ids=str(folder / f"{name}.ids"), then=then))
    return Step(name, lane, limit, str(script))


def living(folder: Path, name: str) -> list[int]:
    """Which processes of a family still run; those that ended and wait to be reaped do not."""
    found = []
    for word in (folder / f"{name}.ids").read_text().split():
        with contextlib.suppress(OSError):
            state = Path("/proc", word, "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(int(word))
    return found


@pytest.mark.parametrize(
    ("then", "limit", "status"), [(WAIT, 5, None), ("sys.exit(5)", 60, 5), ("os.abort()", 60, -6)]
)
def test_no_process_of_a_step_is_left(
    tmp_path: Path, then: str, limit: int, status: int | None
) -> None:
    outcome = run_step(family(tmp_path, "one", then, limit=limit), GIVEN, None, tmp_path)
    assert outcome.status == status
    assert living(tmp_path, "one") == []


@contextlib.contextmanager
def interrupted_soon(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Sends this process SIGINT once all families are there."""
    code = (
        "import os, signal, sys, time\n"
        "while not all(map(os.path.exists, sys.argv[2:])): time.sleep(0.05)\n"
        "os.kill(int(sys.argv[1]), signal.SIGINT)\n"
    )
    files = [str(folder / f"{name}.ids") for name in names]
    # A shell has what it runs in the background ignore Ctrl-C, these tests too.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with subprocess.Popen([sys.executable, "-c", code, str(os.getpid()), *files]) as sender:
            yield
            assert sender.wait(timeout=10) == 0
    finally:
        signal.signal(signal.SIGINT, ignored)


def test_ctrl_c_ends_both_lanes_and_leaves_a_whole_record(tmp_path: Path) -> None:
    out = started(tmp_path / "out")
    steps = (
        python("quick", "times", "print('done')"),
        family(tmp_path, "a", WAIT),
        family(tmp_path, "b", WAIT, "tests"),
        python("never", "tests", "print('no')"),
    )
    begun = time.monotonic()
    with interrupted_soon(tmp_path, ("a", "b")), pytest.raises(KeyboardInterrupt):
        run_all(steps, 2, out)
    assert time.monotonic() - begun < 60
    assert living(tmp_path, "a") == living(tmp_path, "b") == []
    recorded = {
        one["name"]: one["status"] for one in json.loads((out / RECORD).read_text())["steps"]
    }
    assert recorded == {"quick": 0, "a": None, "b": None}


def test_an_error_of_the_command_itself_is_not_lost(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        running.run_all([python("one", "times", "")], GIVEN, 2, tmp_path, full)


def test_a_lane_sees_one_of_the_gpus_that_the_command_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = python("one", "times", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run_step(step, GIVEN, 1, tmp_path).last == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert run_step(step, GIVEN, 1, tmp_path).last == "7"
    assert run_step(step, GIVEN, None, tmp_path).last == "4,7"


def test_the_record_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    step = python("one", "times", "print('File ' + '/' + 'a/b/c.py, and 3/4 of docs/x.md')")
    assert run_step(step, GIVEN, None, tmp_path).last == "File c.py, and 3/4 of docs/x.md"


def test_what_an_earlier_run_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("{}")
    run_step(python("one", "times", "import sys; sys.exit(1)"), GIVEN, None, tmp_path)
    assert not (tmp_path / "one.json").exists()


def test_a_second_run_into_a_folder_keeps_the_other_steps(tmp_path: Path) -> None:
    first = begin(tmp_path, BEGUN)
    run_all([python("a", "times", ""), python("b", "times", "")], 1, tmp_path, first)
    again = begin(tmp_path, BEGUN)
    run_all([python("b", "times", "import sys; sys.exit(3)")], 1, tmp_path, again)
    steps = json.loads((tmp_path / RECORD).read_text())["steps"]
    assert {one["name"]: one["status"] for one in steps} == {"a": 0, "b": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**BEGUN, "wheel": {"sha256": "2"}}), "whose wheel differ"),
        (json.dumps(BEGUN)[:30], "not JSON"),
        ("[]", "not what `run` writes"),
        (json.dumps({"sources": SOURCES, "runs": []}), "not what `run` writes"),
        (json.dumps({**BEGUN, "steps": [{}]}), "not what `run` writes"),
    ],
)
def test_a_run_into_the_folder_of_something_else_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ValueError, match=message):
        begin(tmp_path, BEGUN)
    assert (tmp_path / RECORD).read_text() == text
    if "wheel" not in message:
        with pytest.raises(ValueError, match=message):
            install(tmp_path, tmp_path / "results", SOURCES, STEPS)


def test_a_folder_in_which_nothing_ended_is_not_installed(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / RECORD).write_text("before")
    out = started(tmp_path / "out")
    with pytest.raises(ValueError, match="no step"):
        install(out, results, SOURCES, STEPS)
    with pytest.raises(OSError, match=RECORD):
        install(tmp_path / "nowhere", results, SOURCES, STEPS)
    assert (results / RECORD).read_text() == "before"


OTHER = {"sources": {"cpp": "x"}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param("backward", json.dumps(OTHER), "other kernels", id="a-benchmark"),
        pytest.param("backward", '{"a', "not JSON", id="not-json"),
        pytest.param("verification", json.dumps({"build": OTHER}), "other kernels", id="a-report"),
        pytest.param("bench", json.dumps(OTHER), "bench/bench.json: .*other kernels", id="bench"),
    ],
)
def test_each_result_is_looked_at_before_one_is_copied(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    results.mkdir()
    steps = [{"name": step, "status": 0} for step in ("forward", name)]
    (out / RECORD).write_text(json.dumps({**BEGUN, "steps": steps}))
    (out / "forward.json").write_text(json.dumps({"sources": SOURCES}))
    result = next(step.result for step in STEPS if step.name == name)
    path = out / result / f"{result}.json" if "." not in result else out / result
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        install(out, results, SOURCES, STEPS)
    assert list(results.iterdir()) == []


def test_steps_of_the_same_wheel_stay_in_the_installed_record(tmp_path: Path) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    for folder, name in ((out, "forward"), (results, "backward")):
        folder.mkdir()
        steps = [{"name": name, "status": 0}]
        (folder / RECORD).write_text(json.dumps({**BEGUN, "steps": steps}))
    others = {"sources": {**SOURCES, "cpp": "x"}}
    (results / "backward.json").write_text(json.dumps(others))
    (results / "verification").mkdir()
    (results / "verification" / "verification.json").write_text(json.dumps({"build": others}))
    install(out, results, SOURCES, STEPS)
    steps = json.loads((results / RECORD).read_text())["steps"]
    assert [one["name"] for one in steps] == ["backward", "forward"]
    assert left_behind(results, SOURCES) == ["backward.json", "verification/verification.json"]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as the installed wheel, on a machine with one GPU."""
    path = tmp_path / "one.whl"
    path.write_bytes(b"")
    monkeypatch.setattr(evidence, "_want_installed", lambda _: None)
    monkeypatch.setattr(records, "environment", lambda *_: {**BEGUN})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return path


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        evidence.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_begin_is_said_in_a_line(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    run = ("run", "--wheel", str(wheel), "--out")
    assert "no step to run" in error_of(capsys, *run, out, "--only", "tests", "--lanes", "times")
    assert "no step to run" in error_of(capsys, *run, out, "--only", "ranks")  # one GPU
    assert "invalid choice" in error_of(capsys, *run, out, "--only", "nothing")
    assert "does not exist" in error_of(capsys, *run, out, "--baseline", str(tmp_path / "no.so"))
    assert "name another folder" in error_of(capsys, *run, str(RESULTS / "x"))
    assert "exists" in error_of(capsys, *run, str(wheel))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no GPU" in error_of(capsys, *run, out)
    assert "not JSON" not in error_of(capsys, "install", str(tmp_path / "nowhere"))
    assert not (tmp_path / "out" / RECORD).exists()


def test_another_wheel_than_the_installed_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flash_attn_deterministic-9-py3-none-any.whl"
    command = ("run", "--wheel", str(path), "--out", str(tmp_path / "out"))
    assert "is not a file" in error_of(capsys, *command)
    path.write_bytes(b"PK")
    assert "is not a wheel" in error_of(capsys, *command)


def test_a_second_run_at_once_is_refused(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with evidence._alone(tmp_path):
        words = ("run", "--wheel", str(wheel), "--out", str(tmp_path))
        assert "another run writes" in error_of(capsys, *words)


@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_is_that_of_the_steps(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    seen: list[list[str]] = []

    def run(steps: list[Step], *_: object) -> list[Outcome]:
        seen.append([step.name for step in steps])
        return [Outcome("one", "", status, 0.0, {}, "")]

    monkeypatch.setattr(evidence, "run_all", run)
    # Set by the command, for its steps.
    monkeypatch.setenv("FLASH_ATTN_WHEEL", os.environ.get("FLASH_ATTN_WHEEL", ""))
    words = ["run", "--wheel", str(wheel), "--out", str(tmp_path / "out")]
    assert evidence.main([*words, "--only", "forward", "ranks"]) == status
    assert seen == [["forward"]]


def test_timeout_ends_a_run_as_ctrl_c_does(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> list[Outcome]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        raise AssertionError

    monkeypatch.setattr(evidence, "run_all", run)
    monkeypatch.setenv("FLASH_ATTN_WHEEL", os.environ.get("FLASH_ATTN_WHEEL", ""))
    # Commands that ran in this process before may have left a handler.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert evidence.main(["run", "--wheel", str(wheel), "--out", str(tmp_path / "out")]) == 130
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
