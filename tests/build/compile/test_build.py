from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import fake_wheel
import pytest
from flash_attn_build.compile import build, build_folder, toolchain
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.files import ROOT
from flash_attn_build.wheel import sbom

NAME = f"flash_attn_deterministic-{fake_wheel.VERSION}"
CUDA = toolchain.Toolchain(
    Path("/cuda/bin/nvcc"), Path("/cuda"), "13.0.88", Path("/cuda/lib64/libcudart_static.a")
)


class Backend:
    """Stands in for scikit-build-core: notes how it was called, makes a small wheel."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.status = files, 0
        self.settings: dict[str, str] = {}
        self.env: dict[str, str] = {}

    def __call__(self, command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
        assert "scikit_build_core.build" in command[2]
        out, self.settings = Path(command[4]), json.loads(command[5])
        self.env = dict(environ)
        folder = Path(self.settings["build-dir"])
        Path(folder, "compile_commands.json").write_text("[]")
        Path(folder, build_folder.LOG).write_text("# ninja log v7\n")
        arch = self.env.get("_PYTHON_HOST_PLATFORM", "linux-x86_64").partition("-")[2]
        if not self.status:
            fake_wheel.pack(out, self.files, f"py3-none-linux_{arch}")
        return self.status, "FAILED: [code=1] a.o\ng++ a.cpp\na.cpp:1: error: x\n[2 of 3, \n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    binary = fake_wheel.library(tmp_path_factory.mktemp("library"))
    return fake_wheel.plain(binary)


@pytest.fixture
def request_(tmp_path: Path) -> build.Request:
    return build.Request("dev", tmp_path / "dist", tmp_path / "build", ("A=1;2", "B=x"))


@pytest.fixture
def backend(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend(files)
    monkeypatch.setattr(build, "run_group", made)
    return made


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find", lambda environ, arch: CUDA)
    monkeypatch.setattr(sbom, "find_components", lambda cuda: fake_wheel.COMPONENTS)
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in build_folder.influences(os.environ):
        monkeypatch.delenv(name)


def test_puts_wheel_and_manifest_into_dist(
    request_: build.Request, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    wheel = build.build(request_)
    assert wheel.name == f"{NAME}-py3-none-manylinux_2_28_x86_64.whl"
    names = sorted(path.name for path in request_.out_dir.iterdir())
    assert names == [wheel.name, f"{wheel.name}.manifest.json"]
    text = json.loads((request_.out_dir / names[1]).read_text())
    expected = {"preset": "dev", "jobs": 3, "source_date_epoch": 1700000000, "locked": False}
    assert text["build"].items() >= expected.items()
    assert text["build"]["environment"] == {"NVCC_APPEND_FLAGS": "--use_fast_math"}
    assert text["tools"]["nvcc"] == CUDA.version
    assert text["sources"] == fake_wheel.INFO["sources"]
    assert backend.settings == {
        "build-dir": str(request_.build_dir),
        "cmake.args": "--preset=dev",
        "install.strip": "false",
        "cmake.define.A": "1;2",
        "cmake.define.B": "x",
    }
    # Compilers that are stopped leave their files in a folder that goes with the build.
    assert Path(backend.env["TMPDIR"]).parent == request_.out_dir
    assert backend.env["CUDACXX"] == "/cuda/bin/nvcc"
    assert backend.env["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    # The build's own check compares the metadata with the name.
    assert build.build(replace(request_, local="cu130")).name.startswith(f"{NAME}+cu130-py3-none-")


@pytest.mark.parametrize("failure", ["compilation", "gate"])
def test_a_failure_leaves_dist_as_it_was(
    request_: build.Request, backend: Backend, failure: str
) -> None:
    request_.out_dir.mkdir()
    (request_.out_dir / "old.whl").write_text("")
    if failure == "gate":
        backend.files = {**backend.files, "flash_attn_deterministic/a.cu": b""}
        with pytest.raises(RefusedError, match=r"a\.cu' does not belong"):
            build.build(request_)
    else:
        backend.status = 1
        with pytest.raises(BuildError) as caught:
            build.build(request_)
        assert str(caught.value) == (
            "the build failed (exit status 1):\nFAILED: [code=1] a.o\na.cpp:1: error: x"
        )
    assert [path.name for path in request_.out_dir.iterdir()] == ["old.whl"]


NINJA = """[1 of 3, 00:01, about 00:09 left] Building CXX object b.o
b.cpp:1: warning: error: is a word
FAILED: [code=137] a.o
nvcc -o a.o
Killed
[2 of 3, 00:05, about 00:03 left] Building CXX object c.o
FAILED: [code=1] d.o
ninja: build stopped: subcommand failed.
"""
CMAKE = """-- The CXX compiler identification is GNU 12.2.0
CMake Error at cmake/Link.cmake:4 (message):
  The target: expected

-- Configuring incomplete, errors occurred!
"""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(NINJA, ["FAILED: [code=137] a.o", "Killed"], id="ninja"),
        pytest.param(CMAKE, CMAKE.splitlines()[1:3], id="cmake"),
        pytest.param("error: no index\nCMake Error at x\n", ["error: no index", "CMake Error at x"],
                     id="ours"),
        pytest.param("a\n" * 30, ["a"] * 20, id="none"),
        pytest.param("", [], id="nothing"),
    ],
)  # fmt: skip
def test_the_first_error(said: str, expected: list[str]) -> None:
    assert build.first_error(said).splitlines() == expected


def test_what_a_command_prints_is_shown_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    early, late = "[2 of 9, 02:59, about 05:00 left] x", "[3 of 9, 03:00, about 05:00 left] y"
    command = ["sh", "-c", f"echo '{early}'; echo '{late}' >&2; exit 3"]
    assert build.run_group(command, os.environ) == (3, f"{early}\n{late}\n")
    assert capfd.readouterr().out == f"[2 of 9, 02:59] x\n{late}\n"


def test_the_date_is_that_of_the_last_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.check_output(["git", *who, "-C", str(tmp_path), *arguments], text=True)

    # Outside a checkout, and before the first commit.
    assert build.source_date_epoch({}, tmp_path) == build.FIXED_EPOCH
    git("init", "--quiet")
    assert build.source_date_epoch({}, tmp_path) == build.FIXED_EPOCH
    git("commit", "--quiet", "--allow-empty", "-m", "x", "--date", "1600000000 +0000")
    shown = git("log", "--format=%ct").strip()
    assert build.source_date_epoch({}, tmp_path) == shown
    with pytest.raises(BuildError, match=r"SOURCE_DATE_EPOCH: expected .* got '1\.5'"):
        build.source_date_epoch({"SOURCE_DATE_EPOCH": "1.5"})


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = build.request_from([], tmp_path)
    assert (release.preset, release.out_dir) == ("release", tmp_path / "dist")
    assert release.build_dir == tmp_path / "build" / "release"
    # A small wheel does not take the place of the full one.
    assert build.request_from(["--preset", "dev"], tmp_path).out_dir == tmp_path / "dist" / "dev"
    words = ["-D", "A=1", "-DB=2", "--out-dir", str(tmp_path / "o"), "--build-dir", str(tmp_path)]
    assert build.request_from(words) == build.Request(
        "release", tmp_path / "o", tmp_path, ("A=1", "B=2")
    )
    for wrong, expected in (
        (["-D", "A"], "expected NAME=VALUE, got 'A'"),
        (["--local", "cu-1"], "expected letters and digits, got 'cu-1'"),
        (["--build-dir", "/it's (1)"], "nvcc does not compile in"),
        # The session that installs the compilers would not know abbreviations.
        (["--lock"], "unrecognized arguments: --lock"),
    ):
        with pytest.raises(SystemExit):
            build.request_from(wrong)
        assert expected in capsys.readouterr().err


def test_command_tells_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: build.Request) -> None:
        raise OSError(28, "No space left on device", "dist/x.whl")

    monkeypatch.setattr("sys.argv", ["build", "--preset", "dev"])
    monkeypatch.setenv("MAX_JOBS", "all")
    assert build.main() == 1
    assert "error: MAX_JOBS" in capsys.readouterr().err
    monkeypatch.setattr(build, "build", fail)
    assert build.main() == 1
    assert "error: [Errno 28] No space left on device: 'dist/x.whl'" in capsys.readouterr().err


SLEEPER = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    """A build that is stopped ends what it started, and removes its temporary folder."""
    noted, out = tmp_path / "pid", tmp_path / "dist"
    out.mkdir()
    script = (
        "import signal, sys, tempfile, os\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from flash_attn_build import errors\n"
        "from flash_attn_build.compile import build\n"
        "def work():\n"
        f"  with tempfile.TemporaryDirectory(dir={str(out)!r}):\n"
        f"    build.run_group([sys.executable, '-c', {SLEEPER!r}, {str(noted)!r}], os.environ)\n"
        "sys.exit(errors.exit_status(work))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen([sys.executable, "-c", script], env=environ)
    deadline = time.monotonic() + 30
    while not (noted.exists() and noted.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert list(out.iterdir())
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert list(out.iterdir()) == []
    grandchild = Path("/proc", noted.read_text())
    while grandchild.exists() and "\nState:\tZ" not in (grandchild / "status").read_text():
        assert time.monotonic() < deadline, "what the build started still runs"
        time.sleep(0.02)
