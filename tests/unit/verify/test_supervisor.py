"""The child process: what happens when a check kills it, hangs, or prints."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flash_attn_deterministic.build_info import Instance, build_info
from flash_attn_deterministic.verify import environment
from flash_attn_deterministic.verify.supervisor import Supervisor
from flash_attn_deterministic.verify.tasks import Options, Task

SAMPLE = """
    import ctypes, os, sys, time

    if os.environ.get("NO_START"):
        raise SystemExit("cannot start")

    from flash_attn_deterministic.verify.contract import check

    def execute(task, options, on_case):
        task = task.id
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
        settings = [n for n in os.environ if n.startswith(("FA2_", "FLASH_ATTENTION_"))]
        data = {"pid": os.getpid(), "settings": settings, "quick": options.quick}
        if task == "broken":
            check.usable = lambda device: False
        return {"status": "passed", "data": data}
"""


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    (tmp_path / "sample_tasks.py").write_text(textwrap.dedent(SAMPLE))
    monkeypatch.syspath_prepend(tmp_path)
    execute = importlib.import_module("sample_tasks").execute
    with Supervisor(Options("cpu", True), execute, silence=60) as one:
        yield one
    del sys.modules["sample_tasks"]


def nothing(name: str, number: int, total: int) -> None:
    pass


def test_one_worker_serves_all_tasks(supervisor: Supervisor) -> None:
    seen = []
    first = supervisor.run(Task("contract", "good"), lambda *case: seen.append(case))
    assert seen == [("first", 0, 2), ("second", 1, 2)]
    second = supervisor.run(Task("contract", "good"), nothing)
    assert first["status"] == "passed"
    assert first["data"]["quick"] is True
    assert first["data"]["pid"] == second["data"]["pid"]


@pytest.mark.parametrize(
    ("task", "words"),
    [("segfault", "killed by SIGSEGV at case second"), ("exit", "ended with status 3 at case")],
)
def test_a_dead_worker_fails_its_task_and_the_next_one_runs(
    supervisor: Supervisor, task: str, words: str
) -> None:
    before = supervisor.run(Task("contract", "good"), nothing)
    found = supervisor.run(Task("contract", task), nothing)
    assert found["status"] == "error"
    assert words in found["reason"]
    assert found["data"] == ({"stderr": "last words"} if task == "exit" else {})
    after = supervisor.run(Task("contract", "good"), nothing)
    assert after["status"] == "passed"
    assert after["data"]["pid"] != before["data"]["pid"]


def test_an_exception_is_a_result_of_the_task(supervisor: Supervisor) -> None:
    before = supervisor.run(Task("contract", "good"), nothing)
    found = supervisor.run(Task("contract", "raise"), nothing)
    assert (found["status"], found["reason"]) == ("error", "ValueError: no such kernel")
    # The process is as good as before.
    assert supervisor.run(Task("contract", "good"), nothing)["data"] == before["data"]


def test_a_broken_gpu_context_means_another_process(supervisor: Supervisor) -> None:
    broken = supervisor.run(Task("contract", "broken"), nothing)
    after = supervisor.run(Task("contract", "good"), nothing)
    assert broken["status"] == after["status"] == "passed"
    assert broken["data"]["pid"] != after["data"]["pid"]


def test_a_hanging_worker_is_killed(supervisor: Supervisor) -> None:
    supervisor.run(Task("contract", "good"), nothing)
    supervisor._silence = 1.0
    found = supervisor.run(Task("contract", "hang"), nothing)
    assert found["status"] == "error"
    assert "no sign of life for 1 seconds at case second" in found["reason"]


def test_a_worker_that_does_not_start(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_START", "1")
    found = supervisor.run(Task("contract", "good"), nothing)
    assert found["status"] == "error"
    assert "ended with status 1" in found["reason"]


def test_the_users_settings_do_not_reach_the_checks(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FA2_DETERMINISTIC", "FLASH_ATTENTION_FAMILY", "FLASH_ATTENTION_TEST_DEVICE"):
        monkeypatch.setenv(name, "sm80")
    assert supervisor.run(Task("contract", "good"), nothing)["data"]["settings"] == []
    assert os.environ["FLASH_ATTENTION_FAMILY"] == "sm80"


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_wheel_without_hoppers_kernels_runs_the_others(
    family: str, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASH_ATTENTION_FAMILY", raising=False)
    info = replace(build_info(), instances=(Instance("fwd", "bf16", 64, family),))
    monkeypatch.setattr(environment, "build_info", lambda: info)
    found = supervisor.run(Task("contract", "good"), nothing)["data"]["settings"]
    assert found == ["FLASH_ATTENTION_FAMILY"] * (family == "sm80")
    assert "FLASH_ATTENTION_FAMILY" not in os.environ
