"""The child process: what happens when a check kills it, hangs, or prints."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from flash_attn_deterministic.verify.supervisor import Supervisor
from flash_attn_deterministic.verify.tasks import Options

WORKER = """
    import ctypes, os, sys, time
    from flash_attn_deterministic.verify import worker

    def execute(section, task, options, on_case):
        on_case("first", 0, 2)
        on_case("second", 1, 2)
        if task == "segfault":
            ctypes.string_at(0)
        if task == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if task == "raise":
            raise ValueError("no such kernel")
        if task == "hang":
            time.sleep(60)
        if task == "print":
            print("noise from a library")
            os.write(1, b"more noise\\n")
        settings = [n for n in os.environ if n.startswith(("FA2_", "FLASH_ATTENTION_"))]
        data = {"pid": os.getpid(), "settings": settings, "quick": options.quick}
        return {"status": "passed", "data": data, "broken": task == "broken"}

    def main():
        worker.main(execute)

    def no_start():
        raise SystemExit("cannot start")
"""


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    (tmp_path / "sample_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with Supervisor(Options("cpu", True), "sample_worker:main", silence=20) as one:
        yield one


def nothing(name: str, number: int, total: int) -> None:
    pass


def test_one_worker_serves_all_tasks(supervisor: Supervisor) -> None:
    first = supervisor.run("contract", "good", nothing)
    second = supervisor.run("contract", "good", nothing)
    assert first["status"] == "passed"
    assert first["data"]["quick"] is True
    assert first["data"]["pid"] == second["data"]["pid"]


def test_cases_are_told(supervisor: Supervisor) -> None:
    seen = []
    supervisor.run("contract", "good", lambda *case: seen.append(case))
    assert seen == [("first", 0, 2), ("second", 1, 2)]


@pytest.mark.parametrize(
    ("task", "words"),
    [("segfault", "killed by SIGSEGV at case second"), ("exit", "ended with status 3 at case")],
)
def test_a_dead_worker_fails_its_task_and_the_next_one_runs(
    supervisor: Supervisor, task: str, words: str
) -> None:
    before = supervisor.run("contract", "good", nothing)
    found = supervisor.run("contract", task, nothing)
    assert found["status"] == "error"
    assert words in found["reason"]
    after = supervisor.run("contract", "good", nothing)
    assert after["status"] == "passed"
    assert after["data"]["pid"] != before["data"]["pid"]


def test_last_words_are_kept(supervisor: Supervisor) -> None:
    assert supervisor.run("contract", "exit", nothing)["data"]["stderr"] == "last words"


def test_an_exception_is_a_result_of_the_task(supervisor: Supervisor) -> None:
    before = supervisor.run("contract", "good", nothing)
    found = supervisor.run("contract", "raise", nothing)
    assert (found["status"], found["reason"]) == ("error", "ValueError: no such kernel")
    # The process is as good as before.
    assert supervisor.run("contract", "good", nothing)["data"] == before["data"]


def test_a_broken_gpu_context_means_another_process(supervisor: Supervisor) -> None:
    broken = supervisor.run("contract", "broken", nothing)
    after = supervisor.run("contract", "good", nothing)
    assert broken["status"] == after["status"] == "passed"
    assert broken["data"]["pid"] != after["data"]["pid"]


def test_a_hanging_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with Supervisor(Options("cpu", True), "hanging_worker:main", silence=15) as supervisor:
        supervisor.run("contract", "good", nothing)
        supervisor._silence = 1.0
        found = supervisor.run("contract", "hang", nothing)
        assert found["status"] == "error"
        assert "no sign of life for 1 seconds at case second" in found["reason"]


def test_what_libraries_print_is_no_event(supervisor: Supervisor) -> None:
    assert supervisor.run("contract", "print", nothing)["status"] == "passed"


def test_a_worker_that_does_not_start(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_worker", "sample_worker:no_start")
    found = supervisor.run("contract", "good", nothing)
    assert found["status"] == "error"
    assert "ended with status 1" in found["reason"]
    assert found["data"]["stderr"] == "cannot start"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FA2_DETERMINISTIC", "0"),
        ("FLASH_ATTENTION_FAMILY", "sm80"),
        ("FLASH_ATTENTION_TEST_DEVICE", "family=sm80"),
    ],
)
def test_the_users_settings_do_not_reach_the_checks(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert supervisor.run("contract", "good", nothing)["data"]["settings"] == []
