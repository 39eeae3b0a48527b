from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flash_attn_build.compile import launcher

MIB = 1 << 20
START = [sys.executable, "-I", "-S", str(launcher.__file__), "--log-dir"]


def launch(log_dir: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*START, str(log_dir), "--", *command],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def record(log_dir: Path) -> Any:
    (path,) = log_dir.iterdir()
    return json.loads(path.read_text())


def test_output_and_success_pass_through(tmp_path: Path) -> None:
    done = launch(tmp_path / "log", "sh", "-c", "echo out; echo err >&2", "-o", "a/b.cu.o")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")
    assert record(tmp_path / "log")["output"] == "a/b.cu.o"
    assert [p.name for p in (tmp_path / "log").iterdir()] == ["a__b.cu.o.json"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 42", 42),
        *(
            (f"kill -{int(number)} $$", -number)
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT, signal.SIGPIPE)
        ),
    ],
)
def test_failure_and_death_pass_through_and_leave_no_record(
    tmp_path: Path, script: str, status: int
) -> None:
    assert launch(tmp_path / "log", "sh", "-c", script).returncode == status
    assert not (tmp_path / "log").exists()


def test_signals_reach_the_command(tmp_path: Path) -> None:
    script = "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    command = [*START, str(tmp_path), "--", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "caught\n"
    assert process.returncode == 7


def test_a_signal_right_after_the_start_leaves_no_command_behind(tmp_path: Path) -> None:
    program = f"""
import os, runpy, signal, sys
spawn = os.posix_spawnp
def interrupted(*words, **options):
    child = spawn(*words, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return child
os.posix_spawnp = interrupted
sys.argv = ["launcher.py", "--log-dir", {str(tmp_path)!r}, "--", "sleep", "60"]
runpy.run_path({str(launcher.__file__)!r}, run_name="__main__")
"""
    # The pipe stays open as long as the command lives.
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=False, timeout=30
    )
    assert done.returncode == -signal.SIGTERM


def test_a_parent_that_ignores_the_end_of_children(tmp_path: Path) -> None:
    program = f"""
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
command = {[*START, str(tmp_path), "--", "sh", "-c", "exit 42"]!r}
os.execv(command[0], command)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=30)
    assert done.returncode == 42


def test_counts_the_largest_descendant_and_all_cpu_time(tmp_path: Path) -> None:
    # As nvcc does: a driver that waits for its stages.
    stage = f"b = bytearray({200 * MIB}); x = sum(range(2_000_000))"
    driver = (
        "import subprocess, sys\n"
        f"for _ in range(2): subprocess.run([sys.executable, '-S', '-c', {stage!r}], check=True)"
    )
    assert launch(tmp_path / "log", sys.executable, "-S", "-c", driver, "-o", "x.o").returncode == 0
    row = record(tmp_path / "log")
    assert 200 * MIB <= row["peak_rss_bytes"] < 390 * MIB  # the largest, not the sum
    assert row["cpu_seconds"] > 0.02
    assert row["wall_seconds"] > 0


def test_what_cannot_be_run_or_noted(tmp_path: Path) -> None:
    done = launch(tmp_path, "no-such-compiler")
    assert done.returncode == 127
    assert "no-such-compiler" in done.stderr
    # A log folder that cannot be written does not fail the compilation.
    (tmp_path / "file").write_text("")
    done = launch(tmp_path / "file", "true", "-o", "x.o")
    assert done.returncode == 0
    assert "no record of x.o" in done.stderr
    assert launcher.main(["true"]) == 2  # wrong usage
