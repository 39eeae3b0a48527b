"""The command: exit status, bad input, interruption; with a stand-in for the worker, and really."""

from __future__ import annotations

import dataclasses
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flash_attn_deterministic import build_info as record
from flash_attn_deterministic import lab
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.info import collect
from flash_attn_deterministic.verify import environment, installed, outcome, report, tasks
from flash_attn_deterministic.verify import supervisor as supervisors
from flash_attn_deterministic.verify.installed import Installed, NotInstalledError
from flash_attn_deterministic.verify.outcome import Exit
from flash_attn_deterministic.verify.run import Run
from flash_attn_deterministic.verify.shared import provenance

from verify.samples import ENVIRONMENT, accuracy, contract, measured, read

Answers = dict[str, Callable[[], dict[str, Any]]]


class StandIn:
    """A worker that knows all answers, and gives what a test wants of a section or task instead."""

    instead: ClassVar[Answers]

    def __init__(self, options: tasks.Options) -> None:
        pass

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, task: tasks.Task, on_case: Callable[..., None]) -> dict[str, Any]:
        on_case("a case", 0, 2)
        other = self.instead.get(task.section, self.instead.get(task.id, dict))
        if task.section in tasks.TIMED:
            return {**measured(task.section), **other()}
        return {**(contract() if task.section == "contract" else accuracy(task.id)), **other()}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class One(StandIn):
        instead: ClassVar[Answers] = {}

    monkeypatch.setattr(supervisors, "Supervisor", One)
    monkeypatch.setattr(installed, "inspect", lambda wheel: Installed("0.1.0", False, 90, (), None))
    return One


def verify(out: Path, *arguments: str) -> int:
    return main(["verify", "--device", "cpu", "--quick", "--out", str(out), *arguments])


@pytest.mark.usefixtures("stand_in")
def test_all_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path) == Exit.PASSED
    record = read(tmp_path)
    assert (record["status"], record["quick"], record["device"]) == ("passed", True, "cpu")
    captured = capsys.readouterr()
    assert "passed          Contract" in captured.out
    assert "contract: batch: passed" in captured.err


@pytest.mark.usefixtures("stand_in")
def test_a_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_device", lambda device: None)
    monkeypatch.setattr(provenance, "machine", lambda device: ENVIRONMENT)
    monkeypatch.setattr(tasks, "holds", lambda device: lambda config: True)
    assert main(["verify", "--out", str(tmp_path)]) == Exit.PASSED
    record = read(tmp_path)
    assert {section["status"] for section in record["sections"]} == {"passed"}
    assert record["environment"] == ENVIRONMENT


@pytest.mark.parametrize(
    ("section", "status", "result"),
    [("contract", Exit.CONTRACT, "failed"), ("accuracy", Exit.ACCURACY, "error")],
)
def test_each_section_has_its_exit_status(
    stand_in: type[StandIn], section: str, status: Exit, result: str, tmp_path: Path
) -> None:
    stand_in.instead[section] = lambda: {"status": result}
    assert verify(tmp_path) == status
    assert read(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(("failed", "expected"), [
    *((name, Exit.PERFORMANCE) for name in tasks.TIMED),
    ("decode contract", Exit.CONTRACT),
    ("contract environment accuracy", Exit.ENVIRONMENT),
])  # fmt: skip
def test_the_gravest_failed_section_decides(failed: str, expected: Exit) -> None:
    failures = failed.split()
    sections = [
        {"id": s, "status": "failed" if s in failures else "passed"} for s in outcome.SECTIONS
    ]
    assert outcome.exit_status(sections, complete=True) == expected


def raising(exception: BaseException | type[BaseException]) -> Callable[..., Any]:
    def run(*arguments: object) -> None:
        raise exception

    return run


def test_interrupted(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.instead["decode"] = raising(KeyboardInterrupt)
    assert verify(tmp_path) == Exit.INTERRUPTED
    record = read(tmp_path)
    assert (record["status"], record["complete"]) == ("incomplete", False)
    checks = {c["id"]: c["status"] for c in record["sections"][1]["data"]["checks"]}
    assert (checks["chunk"], checks["decode"]) == ("passed", "not-run")


def test_the_report_of_an_earlier_run_does_not_outlive_a_killed_one(
    stand_in: type[StandIn], tmp_path: Path
) -> None:
    assert verify(tmp_path) == Exit.PASSED
    stand_in.instead["contract"] = raising(SystemError)  # what nobody catches
    with pytest.raises(SystemError):
        verify(tmp_path)
    assert read(tmp_path)["complete"] is False


def test_interrupted_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "inspect", raising(KeyboardInterrupt))
    assert verify(tmp_path / "out") == Exit.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("failed", "status"), [("", Exit.REPORT), ("accuracy", Exit.ACCURACY)], ids=["passed", "failed"]
)
def test_a_page_that_cannot_be_made_does_not_cost_the_results(
    stand_in: type[StandIn],
    failed: str,
    status: Exit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*arguments: Any) -> str:
        raise TypeError("unsupported <format>")

    stand_in.instead[failed] = lambda: {"status": "failed"}
    monkeypatch.setattr("flash_attn_deterministic.verify.report.html", broken)
    assert verify(tmp_path) == status
    record = read(tmp_path)
    assert (record["status"], record["complete"]) == ("failed" if failed else "passed", True)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: verification.md and .html could not be made (TypeError: unsup")
    assert error.endswith("verification.json has the results")
    assert "unsupported &lt;format&gt;" in (tmp_path / "verification.html").read_text()
    for name in report.NAMES[1:]:
        text = (tmp_path / name).read_text()
        assert "The results are in verification.json" in text
        assert "passed" not in text


@pytest.mark.usefixtures("stand_in")
def test_unwritable_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert verify(tmp_path / "file" / "out") == Exit.REPORT
    assert "choose another folder with --out" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--help"])
    assert caught.value.code == Exit.PASSED
    printed = " ".join(capsys.readouterr().out.split())
    for status in Exit:
        assert f" {int(status)} " in printed
    for option in ("--wheel FILE", "--out DIR", "--quick", "--allow-source"):
        assert option in printed


@pytest.mark.parametrize(("words", "message"), [
    ("--device tpu", "invalid choice: 'tpu'"),
    ("--ranks 2 --vllm m", "--vllm: not allowed with argument --ranks"),
    ("--ranks 2 --allow-source", "--allow-source: expected together with --wheel"),
    ("--wheel no.whl", "--wheel: expected a file that ends in .whl, got no.whl"),
    ("--ranks 2 --wheel no.whl", "--wheel: expected a file that ends in .whl, got no.whl"),
])  # fmt: skip
def test_wrong_options(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["verify", "--device", "cpu", *words.split()])
    except SystemExit as refused:  # of argparse
        status = int(refused.code or 0)
    assert status == Exit.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("stand_in")
def test_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["verify", "--out", str(tmp_path / "out")]) == Exit.ENVIRONMENT
    assert "use a machine with an NVIDIA GPU, or --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reason", ["", "cuda:0 has compute capability 7.5"])
def test_a_gpu_that_the_wheel_does_not_run_on(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = collect.Device(0, "T4", "7.5", not reason, reason)
    found = dataclasses.replace(collect.collect(), devices=(device,))
    monkeypatch.setattr(collect, "collect", lambda: found)
    with pytest.raises(NotInstalledError, match=reason) if reason else nullcontext():
        environment.check_device("cuda")


def found(problem: str = "", matches: bool | None = None, source: bool = False) -> Installed:
    return Installed("0.1.0", source, 90, (problem,) if problem else (), matches)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("installation", "words", "status", "message"), [
    pytest.param(found(source=True), "", Exit.ENVIRONMENT, "runs from a source tree",
        id="source-tree"),
    pytest.param(found(source=True), "--allow-source", Exit.PASSED, "", id="of-a-developer"),
    pytest.param(found("a.so: not the bytes of the wheel", matches=False), "--wheel a.whl",
        Exit.ENVIRONMENT, "a.so: not the bytes of the wheel; install it with pip",
        id="another-wheel"),
    pytest.param(found("a.py: differs from RECORD"), "", Exit.ENVIRONMENT, "a.py: differs",
        id="changed"),
])  # fmt: skip
def test_what_is_installed_decides(
    installation: Installed,
    words: str,
    status: Exit,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(installed, "inspect", lambda wheel: installation)
    monkeypatch.setattr(installed, "read_wheel", lambda path: installed.Wheel(path, "0" * 64))
    assert verify(tmp_path, *words.split()) == status
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    if (tmp_path / "verification.json").exists():
        assert read(tmp_path)["source_tree"] is installation.source_tree


def test_a_wheel_without_a_needed_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "holds", lambda device: lambda config: config[0] == 64)
    (problem,) = environment.problems("cuda", {"driver": None}, True)
    assert problem == (
        "the wheel holds no kernel for fp16 head_dim 128, bf16 head_dim 128; install the release "
        "wheel"
    )
    assert environment.problems("cpu", {}, True) == []
    (problem,) = environment.problems("cpu", {}, False)
    assert problem == "the wheel was built with FLASH_ATTENTION_DETERMINISTIC=OFF"


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "holds", lambda device: lambda config: True)
    (problem,) = environment.problems("cuda", {"driver": "449.12"}, True)
    assert problem.startswith("driver 449.12 is older than ")


PLAIN = "80-real 90-real 80-virtual 90-virtual"


@pytest.mark.parametrize(("names", "capability", "ran", "ptx", "unverified"), [
    pytest.param(PLAIN, None, "", "", "sm_80 sm_90", id="no-gpu"),
    pytest.param(PLAIN, "9.0", "sm_90", "", "sm_80", id="hopper"),
    pytest.param(PLAIN, "8.6", "sm_80", "", "sm_90", id="a-later-minor-version"),
    pytest.param(PLAIN, "10.0", "", "compute_90", "sm_80 sm_90", id="later"),
    pytest.param(PLAIN, "7.5", "", "", "sm_80 sm_90", id="earlier"),
    # A letter ties machine code to one capability.
    pytest.param("90-real 90a-real 100a-real", "9.0", "sm_90 sm_90a", "", "sm_100a", id="a"),
    pytest.param("100a-real 100-virtual", "10.3", "", "compute_100", "sm_100a", id="other-a"),
    # A family of its own runs beside PTX of the others.
    pytest.param("90a-real 80-virtual", "9.0", "sm_90a", "compute_80", "", id="both"),
    pytest.param("native 90-real", "9.0", "sm_90", "", "", id="a-form-that-says-nothing"),
    pytest.param("80-virtual", "9.0", "", "compute_80", "", id="ptx-alone"),
])  # fmt: skip
def test_architectures(
    names: str, capability: str | None, ran: str, ptx: str, unverified: str
) -> None:
    assert environment.architectures(names.split(), capability) == {
        "ran": ran.split(), "ran_as_ptx": ptx.split(), "unverified": unverified.split()
    }  # fmt: skip


def test_missing_kernels() -> None:
    tile = record.Tile(128, 64, 4)
    held = [("fwd", "bf16", 64), ("fwd", "bf16", 128), ("bwd", "bf16", 64), ("fwd", "fp16", 64)]
    info = dataclasses.replace(
        record.build_info(),
        tiles={64: tile, 128: tile},
        instances=tuple(record.Instance(*one) for one in held),
    )
    missing = [tuple(one.values()) for one in environment.missing_kernels(info)]
    assert missing == [
        ("fwd", "fp16", 128),
        ("bwd", "bf16", 128),
        ("bwd", "fp16", 64),
        ("bwd", "fp16", 128),
    ]


def test_ptx_is_exercised_where_the_driver_passes_over_machine_code() -> None:
    found = environment.architectures(["80-real", "90-real", "80-virtual"], "9.0", force_ptx=True)
    assert found == {"ran": [], "ran_as_ptx": ["compute_80"], "unverified": ["sm_80", "sm_90"]}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_progress(stream: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are shown on a terminal alone, where the line of the task takes their place."""
    monkeypatch.setattr(sys, "stderr", stream)
    verify(tmp_path)
    begin = "\r\x1b[K" if stream.isatty() else ""
    case = f"{begin}1/19  contract: run-to-run 1/2" if stream.isatty() else ""
    first = f"{case}{begin}1/19  contract: run-to-run: passed\n"
    assert stream.getvalue().startswith(first)


def test_tasks_cover_each_section() -> None:
    for device in ("cpu", "cuda"):
        found = {
            task.section for task in tasks.list_tasks(tasks.Options(device, True), lambda _: True)
        }
        left_out = set(tasks.TIMED) if device == "cpu" else set()
        assert found == set(outcome.SECTIONS) - {"environment"} - left_out
    assert tasks.list_tasks(tasks.Options("cuda", False), lambda _: False)


def test_a_wheel_without_kernels_fails_accuracy(tmp_path: Path) -> None:
    options = tasks.Options("cuda", True)
    listed = tasks.list_tasks(options, lambda _: False)
    run = Run(options, tmp_path, None, Installed("0", False, 1, (), None), ENVIRONMENT, listed)
    (accuracy,) = (s for s in run.sections() if s["id"] == "accuracy")
    assert (accuracy["status"], accuracy["reason"]) == (
        "failed", "the wheel holds none of the kernels",
    )  # fmt: skip


@pytest.mark.parametrize("command", ["bench", "scoreboard", "deviation"])
def test_without_the_lab_a_line_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "entry_points", lambda group: [])
    assert main([command, "--device", "cpu"]) == 6
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{command} is in the package flash-attn-deterministic-lab, which is not" in error
    assert "in a clone: python -m pip install ./lab" in error


# --- Really -------------------------------------------------------------------------------------


def command(out: Path, *arguments: str) -> list[str]:
    words = ["verify", "--device", "cpu", "--quick", "--out", str(out), *arguments]
    return [sys.executable, "-m", "flash_attn_deterministic", *words]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_an_incomplete_report(tmp_path: Path, sent: signal.Signals) -> None:
    process = subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "contract: run-to-run" in line:
            break
    process.send_signal(sent)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED
    assert "incomplete" in out
    record = read(tmp_path)
    assert (record["status"], record["complete"]) == ("incomplete", False)
    assert record["sections"][1]["data"]["checks"][0]["status"] == "passed"
