"""`verify --ranks`: its cases, its report, how it starts the ranks."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import rank_functions as ranks
import torch.distributed as dist
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.verify import installed
from flash_attn_deterministic.verify.installed import Installed
from flash_attn_deterministic.verify.outcome import Exit
from flash_attn_deterministic.verify.ranks import cli, run
from flash_attn_deterministic.verify.ranks.cases import (
    CPU,
    CPU_QUICK,
    CUDA,
    CUDA_QUICK,
    Case,
    Scale,
    cases_of,
    counts_of,
)
from rank_pool import pool_of

TINY = Scale((6,), ((16, "bf16"),), ("causal",), 1, 64, 3)


@pytest.mark.parametrize("scale", [CPU, CPU_QUICK, CUDA, TINY])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_cases_can_be_cut(scale: Scale, count: int) -> None:
    cases = list(cases_of(count, scale))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        parts = case.ranks * (2 if case.order == "zigzag" else 1)
        for lengths in (case.lengths_q, case.lengths_k):
            each = lengths if case.order == "zigzag" or not case.packed else (sum(lengths),)
            assert all(length % parts == 0 for length in each), case.name
        assert case.ranks == count
        assert case.nheads_k % (case.degree or 1) == 0


def test_quick_cases_on_gpus_have_all_kinds() -> None:
    cases = list(cases_of(2, CUDA_QUICK))
    assert {case.order for case in cases} == {"contiguous", "zigzag"}
    assert {case.dtype for case in cases} == {"bf16", "fp16"}
    assert {(case.nheads, case.nheads_k) for case in cases} >= {(6, 6), (32, 8), (8, 1)}
    assert {case.mask for case in cases} >= {"full", "causal", "window"}
    assert {case.packed for case in cases} == {False, True}
    assert {case.degree for case in cases} == {None, 1, 2}
    # Borders within a block of rows, and between two.
    assert {case.lengths_q[0] // 2 % 128 == 0 for case in cases} == {False, True}


def test_counts_of_ranks() -> None:
    assert counts_of(2) == [1, 2]
    assert counts_of(4) == [1, 2, 3, 4]
    assert counts_of(8) == [1, 2, 3, 4, 8]
    assert counts_of(6) == [1, 2, 3, 4, 6]


def test_the_report(tmp_path: Path) -> None:
    with pool_of(2) as pool:
        assert pool.run(ranks.verified, TINY, str(tmp_path), False) == [Exit.PASSED] * 2
        record = json.loads((tmp_path / "ranks.json").read_text())
        assert (record["id"], record["status"], record["device"]) == ("ranks", "passed", "cpu")
        assert [row["ranks"] for row in record["rows"]] == [1, 2]
        assert all(row["cases"] and not row["failed"] for row in record["rows"])
        assert "| 2 | " in (tmp_path / "ranks.md").read_text()

        assert pool.run(ranks.verified, TINY, str(tmp_path), True) == [Exit.CONTRACT] * 2
        record = json.loads((tmp_path / "ranks.json").read_text())
        assert record["status"] == "failed"
        example = record["rows"][1]["counter_example"]
        assert "elements differ" in str(example["ranks"])
        assert example["case"].startswith("p2-contiguous-causal")


@pytest.mark.slow
def test_ranks_are_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_attn_deterministic", "verify", "--ranks", "2"]
    command += ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 2 against one device:" in done.stdout
    assert json.loads((tmp_path / "ranks.json").read_text())["status"] == "passed"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Collects commands instead of running them; torchrun then has failed."""
    commands: list[list[str]] = []

    def run_command(command: Sequence[str], environment: dict[str, str]) -> int:
        assert not any(name.startswith(("FA2_", "FLASH_ATTENTION_")) for name in environment)
        commands.append(list(command))
        return 1

    monkeypatch.setattr(cli, "run_command", run_command)
    monkeypatch.setenv("FA2_SPLIT_SIZE", "64")
    monkeypatch.setenv("FLASH_ATTENTION_FAMILY", "sm80")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    return commands


def test_a_rank_that_ended_is_an_error(started: list[list[str]]) -> None:
    assert main(["verify", "--ranks", "3", "--device", "cpu"]) == 1
    (command,) = started
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    assert command[5:10] == ["-m", "flash_attn_deterministic", "verify", "--ranks", "3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_a_signal_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    program = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "def leave(number, frame):\n"
        "    time.sleep(0.5)  # as torchrun waits for its ranks\n"
        "    Path('left').touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "Path('ready').touch()\n"
        "time.sleep(60)\n"
    )

    def interrupt() -> None:
        end = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    # A shell has what it runs in the background ignore Ctrl-C, these tests too.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cli.run_command([sys.executable, "-c", program], os.environ)
    finally:
        sender.join()
        signal.signal(signal.SIGINT, ignored)
    assert (tmp_path / "left").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_wrong_numbers_of_ranks(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--ranks", "1", "--device", "cpu"]) == Exit.USAGE
    assert "--ranks: expected at least 2, got 1" in capsys.readouterr().err
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "4")
    monkeypatch.setitem(os.environ, "RANK", "0")
    assert main(["verify", "--ranks", "2", "--device", "cpu"]) == Exit.USAGE
    assert "--ranks: expected 4, as torchrun has started, got 2" in capsys.readouterr().err
    assert started == []


def test_a_wheel_is_compared_and_passed_on(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = Path("x.whl")
    monkeypatch.setattr(installed, "read_wheel", lambda path: installed.Wheel(path, "0" * 64))
    matches = True
    monkeypatch.setattr(
        installed, "inspect", lambda wheel: Installed("0.1.0", False, 90, (), matches)
    )
    arguments = ["verify", "--ranks", "2", "--device", "cpu", "--wheel", str(wheel)]
    assert main(arguments) == 1
    (command,) = started
    assert command[command.index("--wheel") + 1] == str(wheel.resolve())
    matches = False
    assert main(arguments) == Exit.ENVIRONMENT
    assert "--wheel: the installed files are not those of x.whl" in capsys.readouterr().err
    assert len(started) == 1


def test_a_run_that_ends_early_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the folder has the result of another run."""
    (tmp_path / "ranks.json").write_text('{"status": "passed"}')
    wheel = installed.Wheel(Path("x.whl"), "0" * 64)
    ended: list[int] = []

    def outcome_of(case: Case, device: str) -> dict[str, str]:
        if case.ranks == 2:
            raise RuntimeError("out of memory")
        ended.append(case.ranks)
        return {}

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(run, "outcome_of", outcome_of)
    monkeypatch.setattr(run, "scale_of", lambda device, quick: TINY)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.run("cpu", True, tmp_path, wheel)
    record = json.loads((tmp_path / "ranks.json").read_text())
    assert (record["status"], record["counts"]) == ("incomplete", [1, 2])
    assert record["wheel"] == {"name": "x.whl", "sha256": "0" * 64}
    assert [row["cases"] for row in record["rows"]] == [len(ended)]
    table = (tmp_path / "ranks.md").read_text()
    assert "incomplete" in table
    assert "| 2 | not run |" in table


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    arguments = argparse.Namespace(ranks=2, device="cuda", quick=True, out=Path("x"))
    with pytest.raises(Exception, match="--ranks: expected at most 1, the GPUs of this machine"):
        cli.run(arguments)
