"""What nox sessions share: which wheel is meant, what is installed, where a run of verify goes."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from flash_attn_build.files import ROOT, sha256_of, write_text
from flash_attn_build.release.report import read_gpu_tests
from stand_ins import program

MACHINE = platform.machine()
OTHER = "x86_64" if MACHINE == "aarch64" else "aarch64"


class Stopped(Exception):
    """What a session raises to end."""


class Skipped(Exception):
    """What a session raises that has nothing to do."""


class Session:
    """Stands in for nox's: notes commands, and ends where nox would."""

    python, virtualenv = "3.10", SimpleNamespace(location=Path("/environment"))

    def __init__(self, *posargs: str, said: str = "/packages/nvcc") -> None:
        self.posargs, self.said = list(posargs), said  # by what is run
        self.commands: list[tuple[str, ...]] = []
        self.options: dict[str, Any] = {}  # of the last one

    def error(self, message: str) -> None:
        raise Stopped(message)

    def skip(self, message: str) -> None:
        raise Skipped(message)

    def install(self, *arguments: str) -> None:
        self.commands.append(("install", *arguments))

    def create_tmp(self) -> str:
        return "/temporary"

    def chdir(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, *arguments: str, **options: Any) -> str:
        if arguments[2:4] == ("pip", "install"):
            arguments = ("install", *arguments[4:])
        self.commands.append(arguments)
        self.options = options
        return f"{self.said}\n"


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("noxfile")


@pytest.fixture
def sessions(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield noxfile
    signal.signal(signal.SIGTERM, handler)


def put(folder: Path, *names: str) -> None:
    for age, name in enumerate(names):
        write_text(folder / name, "")
        os.utime(folder / name, (age, age))


def test_the_wheel_that_is_meant(sessions: ModuleType, tmp_path: Path) -> None:
    """Of small wheels the last one that was built; a release is never a guess."""
    put(tmp_path / "dist" / "dev", "a-0.9.0.whl", "a-0.10.0.whl")
    assert sessions.the_wheel(Session(), "dist/dev").name == "a-0.10.0.whl"
    with pytest.raises(Stopped, match="dist: expected a wheel, found none"):
        sessions.the_wheel(Session(), "dist")
    put(tmp_path / "dist", "a-0.1.0.whl", "a-0.2.0.whl")
    with pytest.raises(Stopped, match=r"expected one wheel, found a-0\.1\.0\.whl, a-0\.2\.0\.whl"):
        sessions.the_wheel(Session(), "dist")


def installs(session: Session) -> list[str]:
    """Names of the locks that were installed; all by hash."""
    commands = [command for command in session.commands if command[0] == "install"]
    assert all("--require-hashes" in command for command in commands)
    return [Path(command[-1]).stem for command in commands]


@pytest.mark.parametrize(("arguments", "locks"), [
    pytest.param((), ["build", "torch_cpu"], id="nvcc"),
    pytest.param(("--locked",), ["build", "torch_cpu", "cuda"], id="locked"),
    pytest.param(("--cuda", "12"), ["build", "torch_cpu", "cuda12"], id="cuda"),
    pytest.param(("--cuda=12", "--locked"), ["build", "torch_cpu", "cuda12"], id="both"),
    pytest.param(("--arch", OTHER), ["build", "torch_cpu", "cuda", "cuda"], id="arch"),
])  # fmt: skip
def test_compilers_are_those_that_the_build_is_asked_for(
    sessions: ModuleType, arguments: tuple[str, ...], locks: list[str]
) -> None:
    """The stand-in says of every nvcc that there is one."""
    session = Session()
    sessions.run_build(session, *arguments)
    assert installs(session) == locks
    assert session.commands[-1] == ("python", "-m", "flash_attn_build.compile.build", *arguments)
    # A build that is stopped gets the time to clean up.
    assert session.options["interrupt_timeout"] >= 1
    assert session.options["terminate_timeout"] >= 10
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    last = session.commands[-2]
    assert ("--platform" in last) == (OTHER in arguments)
    if OTHER in arguments:  # beside the packages of this machine
        assert last[last.index("--target") + 1] == str(session.virtualenv.location / OTHER)


def test_torch_is_the_one_of_the_index_where_there_is_none_for_cpus(sessions: ModuleType) -> None:
    session = Session(said="ERROR: No matching distribution found for torch")
    sessions.install_wheel(session, Path("a.whl"))
    assert session.commands[-2:] == [
        ("install", "--no-deps", "--force-reinstall", "a.whl"), ("python", "-m", "pip", "check")
    ]  # fmt: skip
    del session.commands[-2]
    assert installs(session) == ["torch_requires", "torch_cpu", "torch", "torch_cuda"]
    with pytest.raises(Stopped, match="HASHES"):  # another torch is not taken in silence
        sessions.install_torch(Session(said="ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"))


def test_a_cell_of_the_matrix_is_run_until_its_wheel_has_passed(
    sessions: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path / "dist" / "cuda12", "a.whl")
    put(tmp_path / "locks", "test.txt", "matrix/torch-2.10.txt")
    for expected in ("pytest", "skip", "pytest"):
        session = Session()
        with contextlib.suppress(Skipped):
            sessions.matrix(session, cuda="12", torch="2.10")
            assert expected == "pytest"
            assert session.commands[-1] == ("pytest", "tests/unit")
        build = session.commands[0]
        assert build[build.index("--session") + 1] == "build"
        assert build[build.index("--cuda") + 1] == "12"
        assert (len(session.commands) == 1) == (expected == "skip")
        if expected == "skip":  # another wheel is another cell
            (tmp_path / "dist" / "cuda12" / "a.whl").write_text("other")


def test_publish_uploads_what_the_gate_wrote_and_nothing_else(
    sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a-0.1.0-py3-none-manylinux_x86_64.whl", "a-0.1.0-py3-none-manylinux_aarch64.whl")
    release = tmp_path / "build" / "to-publish"
    put(release / "package-index", *names, "added-0-py3-none-any.whl")
    listed = [f"{'0' * 64}  package-index/{name}\n" for name in names]
    (release / "SHA256SUMS").write_text("".join(listed))
    monkeypatch.setenv("TWINE_REPOSITORY_URL", "https://example.org")
    session = Session("--repository", "test")
    sessions.publish(session)
    gate, sums, upload = (command for command in session.commands if command[0] != "install")
    assert gate == ("python", "-m", "flash_attn_build.release")
    # Nothing is installed between the gate and the upload of what it wrote.
    assert session.commands[-3:] == [gate, sums, upload]
    assert sums == ("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
    assert upload[:6] == ("twine", "upload", "--non-interactive", "--repository", "test", "--")
    assert [Path(path).name for path in upload[6:]] == [*names]
    assert session.options["env"] == {"TWINE_REPOSITORY_URL": None}
    for words in (
        ["evil.whl"], ["--repository", "test", "evil.whl"], ["--", "evil.whl"], ["-s"],
        ["--repository", ""],
    ):  # fmt: skip
        session = Session(*words)
        with pytest.raises(SystemExit):
            sessions.publish(session)
        assert session.commands == []


def test_every_wheel_of_this_machine_is_verified_and_the_gate_reads_what_pytest_writes(
    sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("PYTEST_ADDOPTS", "FLASH_ATTENTION_FAMILY", "FA2_SPLIT_SIZE", "PYTHONOPTIMIZE")
    for name in options:
        monkeypatch.setenv(name, "")
    names = [f"a-0.1.0{n}-py3-none-manylinux_{MACHINE}.whl" for n in ("", "+cu12")]
    put(tmp_path / "dist", *names, f"a-0.1.0-py3-none-manylinux_{OTHER}.whl")
    put(tmp_path / "dist" / "verification", "9/x", "x/x")  # each run has a folder of its own
    session = Session()
    sessions.verify(session)
    assert [session.options["env"].get(name, "kept") for name in options] == [None] * 4
    verified = [c[c.index("--wheel") + 1] for c in session.commands if "--wheel" in c]
    assert [Path(path).name for path in verified] == names
    tests = [command for command in session.commands if command[:2] == ("pytest", "tests/gpu")]
    assert [command[-1] for command in tests] == [
        f"--junit-xml={tmp_path}/dist/verification/{run}/gpu-tests.xml" for run in (10, 11)
    ]
    program = (
        "import pytest\ndef test_a(): pass\ndef test_b(request): {}\n"
        "def test_c(): pytest.skip('no')\n"
    )
    put(tmp_path, *[word for word in tests[0] if word.startswith("tests/unit")])
    (tmp_path / "tests" / "conftest.py").symlink_to(ROOT / "tests" / "conftest.py")
    for body, option, expected in (
        ("pass", "-n2", None),
        ("pass", "-knot test_a", "gpu-tests.xml.collected: expected '2', got 'not all, by keyw"),
        ("raise ValueError", "-n0", "gpu-tests.xml: failed: 'tests.gpu.test_x::test_b'"),
        ("request.session.shouldstop = 'x'", "-n0", "gpu-tests.xml.collected: expected '2', got"),
    ):
        write_text(tmp_path / "tests" / "gpu" / "test_x.py", program.format(body))
        run = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", *tests[0][1:]]
        run.append(option)
        subprocess.run(run, cwd=tmp_path, check=False, capture_output=True)
        results = tmp_path / "dist" / "verification" / "10" / "gpu-tests.xml"
        passed, found = read_gpu_tests(results, sha256_of(tmp_path / "dist" / names[0]))
        assert set(passed) == {"tests.gpu.test_x"}
        assert bool(found) == bool(expected)
        assert not expected or found[0].startswith(expected)
        assert any("collected" in each for each in found) == ("collected" in (expected or ""))


def test_an_older_python_is_told_before_anything_is_installed(
    sessions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "BUILD_PYTHON", (99, 0))
    session = Session()
    with pytest.raises(Stopped, match=r"building needs Python 99\.0 or newer; the wheel runs on"):
        sessions.run_build(session, "--preset", "dev")
    assert session.commands == []


def test_gpu_tests_want_their_asserts() -> None:
    run = [sys.executable, "-O", "-m", "pytest", "--collect-only", "tests/gpu/test_sinks.py"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "python -O leaves out asserts" in done.stderr


def test_pytest_skips_no_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """pytest's own rules would skip tests/build."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/**/test_*.py")} | {"build"}
    for rule in pytestconfig.getini("norecursedirs"):
        assert [folder for folder in folders if fnmatch(folder, rule)] == []


def test_the_script_that_runs_nox_wants_the_same_python(
    noxfile: ModuleType, tmp_path: Path
) -> None:
    """An older `python3` is passed over; without another one the reason is given."""
    script = (ROOT / ".ci" / "nox").read_text()
    assert f"sys.version_info < {noxfile.BUILD_PYTHON}" in script
    (tmp_path / ".ci").mkdir()
    copy = Path(shutil.copy(ROOT / ".ci" / "nox", tmp_path / ".ci"))
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}
    tried = re.search(r'for python in (.+) ""', script)
    assert tried
    for name in tried[1].split():
        program(tmp_path / name, "echo Python 3.10.1; exit 1")
    done = subprocess.run([copy], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 1
    assert "error: Python 3.11 or newer is needed" in done.stderr
    assert "on PATH: Python 3.10.1" in done.stderr
    program(tmp_path / "python3.12", f'echo "$@" >> {tmp_path}/calls; [ "$1" = -c ]')
    subprocess.run([copy], capture_output=True, check=False, env=environ)
    assert (tmp_path / "calls").read_text().endswith("-m venv --clear .nox/ci\n")
