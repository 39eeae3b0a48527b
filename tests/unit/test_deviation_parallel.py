from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flash_attn_deterministic.deviation.parallel import each
from flash_attn_deterministic.deviation.progress import Progress


def test_one_process_and_several_give_the_same() -> None:
    items = [3, -1, 2]
    for jobs in (1, 2):
        assert sorted(each(pow, items, jobs, 2)) == [(-1, 1), (2, 4), (3, 9)]


def test_what_a_call_raises_comes_through() -> None:
    with pytest.raises(ValueError, match="base 2"):
        list(each(int, ["1", "x"], 2, 2))


def test_an_interrupt_stops_the_command_and_its_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_attn_deterministic", "deviation", "forward",
               "--no-plots", "--jobs", "2", "--seeds", "64", "--out", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for _ in range(600):
        if (tmp_path / "study.json").exists():
            break
        time.sleep(0.1)
    time.sleep(3)  # workers are starting, or at work
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command goes on from here" in errors
    assert not (tmp_path / "forward.json").exists()


def test_progress_tells_how_far_and_how_long() -> None:
    stream = io.StringIO()
    with Progress("study", 4, done=1, stream=stream) as progress:
        progress.advance("first")
        progress.advance("second", 2)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("study 2/4 0 s, about 0 s left first")
    assert lines[-1].strip() == "study 4/4 0 s"


def test_progress_says_that_it_was_interrupted() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress("study", 4, stream=stream):
        raise KeyboardInterrupt
    assert "interrupted" in stream.getvalue()
