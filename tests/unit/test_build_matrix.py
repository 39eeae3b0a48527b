from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flash_attn_build import matrix
from flash_attn_build.errors import StepError
from flash_attn_build.matrix import Cell, Matrix, Wheel

JUNIT = '<testsuites><testsuite tests="12" failures="{}" errors="0" skipped="2"/></testsuites>'


class Machine:
    """Stands in for environments, pip, the build and pytest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[list[str]] = []
        self.answers: list[tuple[str, int, str, str]] = []  # part of a command, status, out, err
        self.failures = 0
        self.nvcc = True

    def answer(self, part: str, status: int, out: str = "", err: str = "") -> None:
        self.answers.append((part, status, out, err))

    def __call__(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        words = list(command)
        self.commands.append(words)
        text = " ".join(words)
        for part, status, out, err in self.answers:
            if part in text:
                return subprocess.CompletedProcess(words, status, out, err)
        if "cuda-toolkit" in text and self.nvcc:
            packages = Path(words[0]).parents[1] / "lib/python3.11/site-packages"
            (packages / "nvidia/cu13/bin").mkdir(parents=True)
            (packages / "nvidia/cu13/bin/nvcc").write_text("")
        elif "flash_attn_build.build" in text:
            assert Path(environ["CUDACXX"]).name == "nvcc"
            out_dir = Path(words[words.index("--out-dir") + 1])
            out_dir.mkdir(parents=True)
            (out_dir / "fad-1-py3-none-any.whl").write_text("wheel")
        elif "pytest" in words:
            report = next(w for w in words if w.startswith("--junitxml=")).partition("=")[2]
            Path(report).write_text(JUNIT.format(self.failures))
            return subprocess.CompletedProcess(words, int(self.failures > 0), "1 failed", "")
        return subprocess.CompletedProcess(words, 0, "2.10.1+cu128\n", "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tests = tmp_path / "source" / "tests" / "unit"
    tests.mkdir(parents=True)
    (tests / "test_attention.py").write_text("import flash_attn_deterministic")
    (tests / "test_build_jobs.py").write_text("from flash_attn_build import jobs")
    return Machine(tmp_path / "source")


@pytest.fixture
def runner(tmp_path: Path, machine: Machine) -> Matrix:
    return Matrix(tmp_path / "work", "dev", machine, machine.root)


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.fixture(autouse=True)
def _plenty_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 1 << 50)


def test_newest_toolkit_is_what_pip_would_install(runner: Matrix, machine: Machine) -> None:
    report = {"install": [{"metadata": {"name": "cuda-toolkit", "version": "13.4.3"}}]}
    machine.answer("cuda-toolkit==13.*", 0, json.dumps(report))
    assert runner.newest_toolkit() == "13.4"
    assert "--dry-run" in machine.commands[0]


def test_no_toolkit_in_the_packages(runner: Matrix, machine: Machine) -> None:
    machine.answer("cuda-toolkit", 1, err="ERROR: No matching distribution found\n")
    with pytest.raises(StepError, match="no CUDA toolkit in the packages: ERROR: No matching"):
        runner.newest_toolkit()


def test_builds_and_tests_every_wheel_under_every_torch(
    runner: Matrix, machine: Machine, tmp_path: Path
) -> None:
    wheels = [runner.build("13.0"), runner.build("13.4")]
    assert [wheel.name for wheel in wheels] == ["fad-1-py3-none-any.whl"] * 2
    cells = [cell for torch in ("2.10", "2.13") for cell in runner.test(wheels, torch)]
    assert {(cell.toolkit, cell.torch) for cell in cells} == {
        (toolkit, torch) for toolkit in ("13.0", "13.4") for torch in ("2.10", "2.13")
    }
    assert cells[0] == Cell("13.0", "2.10", "passed", "2.10.1+cu128", passed=10, skipped=2)
    # Gigabytes each: gone once they have served.
    assert not [p for p in (tmp_path / "work").rglob("bin") if p.is_dir()]


def test_runs_only_the_tests_of_what_the_wheel_holds(runner: Matrix, machine: Machine) -> None:
    runner.test([runner.build("13.0")], "2.10")
    (command,) = (words for words in machine.commands if "pytest" in words[:3])
    tests = [Path(word).name for word in command if word.endswith(".py")]
    assert tests == ["test_attention.py"]


def test_a_torch_comes_with_what_the_tests_need(runner: Matrix, machine: Machine) -> None:
    runner.test([runner.build("13.0")], "2.10")
    (install,) = (words for words in machine.commands if "torch==2.10.*" in words)
    assert install[-2:] == ["--group", f"{machine.root / 'pyproject.toml'}:test"]


def test_failing_tests_fail_the_cell(runner: Matrix, machine: Machine) -> None:
    wheel = runner.build("13.0")
    machine.failures = 3
    (cell,) = runner.test([wheel], "2.10")
    assert (cell.status, cell.passed, cell.failed) == ("failed", 7, 3)
    assert cell.why == "1 failed"


def no_such_torch(machine: Machine) -> None:
    machine.answer("torch==2.15.*", 1, err="ERROR: No matching distribution found for torch\n")


def no_virtualenv(machine: Machine) -> None:
    machine.answer("-m virtualenv", 1, err="No module named virtualenv\n")


@pytest.mark.parametrize(
    ("break_", "why"),
    [
        pytest.param(no_such_torch, "ERROR: No matching distribution found for torch", id="torch"),
        pytest.param(no_virtualenv, "virtualenv: No module named virtualenv", id="virtualenv"),
    ],
)
def test_a_cell_that_cannot_run_says_why(
    runner: Matrix, machine: Machine, break_: Callable[[Machine], None], why: str
) -> None:
    wheel = runner.build("13.0")
    break_(machine)
    assert runner.test([wheel], "2.15") == [Cell("13.0", "2.15", "not run", why=why)]


def test_no_room_on_the_disk(
    runner: Matrix, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = runner.build("13.0")
    disk(monkeypatch, 3 << 30)
    before = len(machine.commands)
    (cell,) = runner.test([wheel], "2.10")
    assert (cell.status, cell.why) == ("not run", "disk: 3.0 GiB free, 14 GiB wanted")
    assert runner.build("13.4").why == "disk: 3.0 GiB free, 4 GiB wanted"
    assert len(machine.commands) == before


def broken_build(machine: Machine) -> None:
    machine.answer("flash_attn_build.build", 4, err="error: the build failed\nbye\n")


def no_nvcc(machine: Machine) -> None:
    machine.nvcc = False


@pytest.mark.parametrize(
    ("break_", "why"),
    [
        pytest.param(broken_build, "error: the build failed", id="build"),
        pytest.param(no_nvcc, "brings no nvcc", id="nvcc"),
    ],
)
def test_a_toolkit_without_a_wheel_says_why(
    runner: Matrix, machine: Machine, break_: Callable[[Machine], None], why: str
) -> None:
    break_(machine)
    wheel = runner.build("13.0")
    assert not wheel.name
    assert why in wheel.why
    assert runner.test([wheel], "2.10") == [Cell("13.0", "2.10", "not run", why="no wheel")]


def test_report_and_table(tmp_path: Path) -> None:
    wheels = [Wheel("13.0", "a.whl", "ab", path=tmp_path), Wheel("13.4", why="no disk")]
    cells = [
        Cell("13.0", "2.10", "passed", "2.10.1", 40),
        Cell("13.4", "2.10", "not run", why="no wheel"),
    ]
    matrix.save(tmp_path / "m.json", "release", wheels, cells)
    saved: Any = json.loads((tmp_path / "m.json").read_text())
    assert [cell["status"] for cell in saved["cells"]] == ["passed", "not run"]
    assert saved["wheels"][0] == {"toolkit": "13.0", "name": "a.whl", "sha256": "ab", "why": ""}
    assert matrix.table(wheels, cells) == "\n".join(
        [
            "| CUDA toolkit | torch 2.10.1 |",
            "|---|---|",
            "| 13.0 | passed (40) |",
            "| 13.4 | not run |",
            "",
            "- CUDA 13.4: no wheel: no disk",
            "- CUDA 13.4, torch 2.10: no wheel",
        ]
    )


def test_tests_see_the_installed_wheel_and_not_the_source_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"]
    assert matrix._run(ask, {}).stdout.strip() == "None"
    assert matrix._run(ask, {"PYTHONPATH": "tools"}).stdout.strip() == "tools"
