"""The run of compute-sanitizer's tools, with a program in its place that finds what it is told."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.gpu.sanitizers import __main__ as sanitizers
from tests.gpu.sanitizers import calls
from tests.gpu.sanitizers.expected import EXCLUDED, EXPECTED

# The arguments are --tool T --print-limit N [--kernel-name-exclude kns=K] PYTHON calls.py D.
_PROGRAM = """#!/bin/sh
tool=$2
for head_dim; do :; done
echo "========= COMPUTE-SANITIZER"
echo "caching off: ${PYTORCH_NO_CUDA_MEMORY_CACHING:-0}; $*"
case "$tool-$head_dim" in
  memcheck-96) echo "RuntimeError: out of paths"; echo "========= ERROR SUMMARY: 0 errors"; exit 1;;
  initcheck-96) sleep 60 & echo $! > "${0%/*}/child"; wait;;
esac
echo "head dim $head_dim: all calls made"
race() {
  echo "========= Error: Race reported between Read access at $1(CUtensorMap)+0x1b40 in a.cuh:1"
  echo "=========     and Write access at $1(CUtensorMap)+0x1c40 in a.cuh:2 [512 hazards]"
  echo "========="
}
case "$tool-$head_dim" in
  racecheck-64) race fwd_sm90_kernel
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)";;
  racecheck-192) race fwd_sm90_kernel; race fwd_sm90_kernel
    echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)";;
  racecheck-256) race fwd_sm90_kernel; race bwd_sm90_kernel
    echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)";;
  racecheck-32) echo "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)";;
  racecheck-*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "compute-sanitizer"
    path.write_text(_PROGRAM, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_one_line_for_each_tool(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--sanitizer", program, "--out", str(tmp_path), "--head-dims", "64", "72", "192"]
    assert sanitizers.main(arguments) == 1
    lines = [line.partition(" s of ")[0].rstrip("0123456789") for line in
             capsys.readouterr().out.splitlines()]  # fmt: skip
    assert lines == [
        "memcheck   passed: head dims 64, 72, 192; ",
        "initcheck  passed: head dims 64, 72, 192; ",
        "racecheck  FAILED: head dims 64, 72, 192; found 1 at 64, 2 at 192; 1 not expected: "
        "racecheck at head dim 64: Error: Race reported between Read access at "
        "fwd_sm90_kernel(CUtensorMap)+0x1b40 in a.cuh:1; ",
        "synccheck  passed: head dims 64, 72, 192; ",
    ]
    written = json.loads((tmp_path / "sanitizers.json").read_text(encoding="utf-8"))
    assert [one["passed"] for one in written] == [True, True, False, True]
    assert written[2]["found"] == {"64": 1, "72": 0, "192": 2}
    assert list(written[2]["expected"].values()) == [2]
    assert "caching off: 1" in (tmp_path / "memcheck-d64.log").read_text(encoding="utf-8")
    assert "caching off: 0" in (tmp_path / "racecheck-d64.log").read_text(encoding="utf-8")


def test_what_a_tool_leaves_alone_is_named_with_what_looks_instead(
    program: str, tmp_path: Path
) -> None:
    arguments = ["--sanitizer", program, "--out", str(tmp_path), "--head-dims", "64"]
    assert sanitizers.main([*arguments, "--tools", "synccheck"]) == 0
    (written,) = json.loads((tmp_path / "sanitizers.json").read_text(encoding="utf-8"))
    assert written["excluded"].keys() == {"values_kernel"}
    log = (tmp_path / "synccheck-d64.log").read_text(encoding="utf-8")
    assert "--kernel-name-exclude kns=values_kernel" in log


def test_listed_findings_pass_and_others_beside_them_fail(program: str, tmp_path: Path) -> None:
    arguments = ["--sanitizer", program, "--out", str(tmp_path), "--tools", "racecheck"]
    assert sanitizers.main([*arguments, "--head-dims", "192"]) == 0
    assert sanitizers.main([*arguments, "--head-dims", "192", "256"]) == 1
    (written,) = json.loads((tmp_path / "sanitizers.json").read_text(encoding="utf-8"))
    (other,) = written["unexpected"]
    assert "bwd_sm90_kernel" in other


def test_reports_that_can_not_be_read_fail(program: str, tmp_path: Path) -> None:
    arguments = ["--sanitizer", program, "--out", str(tmp_path), "--tools", "racecheck"]
    assert sanitizers.main([*arguments, "--head-dims", "32"]) == 1
    (written,) = json.loads((tmp_path / "sanitizers.json").read_text(encoding="utf-8"))
    assert written["unexpected"] == ["3 reports at head dim 32 could not be read"]


def test_every_exception_has_a_kernel_and_names_another_tool() -> None:
    kernels = Path(__file__).parents[3] / "cpp" / "kernels"
    sources = "".join(path.read_text(encoding="utf-8") for path in kernels.rglob("*.cuh"))
    for name, reason in [
        *((one.what, one.reason) for one in EXCLUDED),
        *((one.what.rpartition("]*")[2], one.reason) for one in EXPECTED),
    ]:
        assert f"{name}(" in sources
        assert "tests.emulator" in reason or "tests.gpu.decode.test_latent" in reason


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"], ids=["calls-failed", "too-slow"])
def test_what_did_not_finish_did_not_pass(
    tool: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--sanitizer", program, "--out", str(tmp_path), "--head-dims", "32", "96"]
    assert sanitizers.main([*arguments, "--tools", tool, "--limit", "2"]) == 1
    assert "FAILED: head dims 32, 96; not finished: 96; " in capsys.readouterr().out
    if tool == "initcheck":  # as compute-sanitizer does, it has started the program as a child
        child = (tmp_path / "child").read_text(encoding="utf-8").strip()
        end = time.monotonic() + 20  # a busy machine takes its time to end a process
        while runs(child):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_all_pass(program: str, tmp_path: Path) -> None:
    arguments = ["--sanitizer", program, "--out", str(tmp_path), "--head-dims", "72", "128"]
    assert sanitizers.main(arguments) == 0


def test_a_missing_program_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sanitizers.main(["--sanitizer", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert "none is not a program" in capsys.readouterr().err


def test_the_calls_are_made_at_every_head_dim() -> None:
    table = json.loads((Path(__file__).parents[3] / "cpp" / "instances.json").read_text())
    tiles = (table["bwd_tiles"], *table["fwd_tiles"].values())
    assert {str(dim) for dim in calls.HEAD_DIMS} >= {dim for own in tiles for dim in own}


def runs(process: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False
