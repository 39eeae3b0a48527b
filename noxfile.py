# /// script
# requires-python = ">=3.10"
# dependencies = ["nox>=2025.10.16"]
# ///
"""Commands of this project: `nox -s build` makes the wheel, `nox -s test` tests it."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import signal
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.16"
# pip, so that the user's own pip configuration (mirrors, proxies, local wheels) counts.
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "test"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TOOLS = {"PYTHONPATH": str(ROOT / "python")}  # flash_attn_build
PYTHONS = ("3.10", "3.14")  # the oldest and the newest that the wheel is tested on
NVCC_PATH = r"[\w./+@-]+"  # nvcc hands paths to a shell, partly without quotes
BUILD_PYTHON = (3, 11)  # the oldest that builds and gates: torch-abi-audit needs it
# NEWEST=1: the newest versions that pyproject.toml allows, and the newest torch, instead of locks/.
NEWEST = bool(os.environ.get("NEWEST"))


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheel into dist/ (-- --preset dev: a small one, in minutes)."""
    run_build(session, *session.posargs)


@nox.session(default=False)
def build_dev(session: nox.Session) -> None:
    """Build the small (dev) wheel into dist/dev/."""
    run_build(session, "--preset", "dev")


@nox.session(requires=["build_dev"])
def test(session: nox.Session) -> None:
    """Build the small wheel and test it, in 10 to 20 minutes on two cores (-- ARGS: pytest's)."""
    wheel = the_wheel(session, "dist/dev")
    # First with its own requirements only: it must not depend on packages of the tests.
    install_wheel(session, wheel)
    session.run("flash-attn-deterministic", "info")
    install(session, "dev")
    install_lab(session)
    session.run("pytest", *session.posargs, env={"FLASH_ATTN_WHEEL": str(wheel)})


@nox.session(python=PYTHONS, default=False)
def test_python(session: nox.Session) -> None:
    """Test the small wheel in dist/dev under another Python, without a build."""
    install_wheel(session, the_wheel(session, "dist/dev"))
    install(session, "test")
    install_lab(session)
    session.run("pytest", *(session.posargs or ["tests/unit", "lab/tests"]))


@nox.session(default=False)
def quick(session: nox.Session) -> None:
    """Test the present Python sources with the library of dist/dev, without a build."""
    wheel = the_wheel(session, "dist/dev")
    install_wheel(session, wheel)
    install(session, "dev")
    install_lab(session)
    where = session.run(
        "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True
    )
    package = "flash_attn_deterministic"
    installed = Path(str(where).strip(), package)
    for path in installed.rglob("*.py"):  # also those that the sources no longer have
        path.unlink()
    shutil.copytree(ROOT / "python" / package, installed, dirs_exist_ok=True)
    session.run(
        "pytest",
        *(session.posargs or ["tests/unit", "lab/tests"]),
        env={"FLASH_ATTN_WHEEL": str(wheel)},
    )


@nox.session(requires=["build_dev"], default=False)
def verify_dev(session: nox.Session) -> None:
    """Verify the small wheel on the CPU, in a minute or two."""
    run_verify(session, the_wheel(session, "dist/dev"), "--device", "cpu", "--quick")


@nox.session(default=False)
def verify(session: nox.Session) -> None:
    """Verify each wheel in dist/ on this machine's GPU: its own `verify`, then tests/gpu."""
    for wheel in wheels(session, "dist"):
        out = run_verify(session, wheel, *session.posargs)
        install(session, "test")
        # The gate reads which wheel it was.
        suite = f"junit_suite_name=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        tests = ["tests/gpu", "-o", suite, f"--junit-xml={out / 'gpu-tests.xml'}"]
        session.run("pytest", *tests, env={"PYTHONPATH": ""})


@nox.session(default=False)
def conformance(session: nox.Session) -> None:
    """Run upstream's own tests against the wheel in dist/ on this GPU (-- --seconds S --seed N)."""
    session.install(str(the_wheel(session, "dist")), *groups("torch", "conformance"))
    # The installed package: tests.conformance finds the build's tools by itself.
    session.run("python", "-m", "tests.conformance", *session.posargs, env={"PYTHONPATH": ""})


@nox.session(requires=["build_dev"], default=False)
def vllm(session: nox.Session) -> None:
    """Check the attention backend against vLLM's own classes, on the CPU (gigabytes)."""
    session.install(str(the_wheel(session, "dist/dev")), *groups("vllm"))
    # vLLM's own warnings are no errors of ours.
    file = "tests/unit/integrations/test_vllm.py"
    session.run("pytest", "-W", "default", file, *session.posargs)


@nox.session(default=False)
def gate(session: nox.Session) -> None:
    """Run the release gate; write the release into build/release (-- --locked: tools by hash)."""
    run_gate(session, "release", *session.posargs)


@nox.session(default=False)
def publish(session: nox.Session) -> None:
    """Run the gate, then upload the wheel (-- --locked: the gate's; other ARGS: twine's)."""
    of_gate = [argument for argument in session.posargs if argument == "--locked"]
    others = [argument for argument in session.posargs if argument != "--locked"]
    run_gate(session, "release", *of_gate)
    wheel = the_wheel(session, "build/release/package-index")
    install(session, "publish")
    session.run("twine", "upload", "--non-interactive", *others, str(wheel))


@nox.session(default=False)
def index(session: nox.Session) -> None:
    """Write the static package index of all releases into build/index (-- --locked)."""
    run_gate(session, "release.index", *session.posargs)


@nox.session(default=False)
def rehearse(session: nox.Session) -> None:
    """Rehearse a release of the wheel in dist/: gate, upload and index on this machine."""
    wheel = the_wheel(session, "dist")
    install(session, "dev")
    environ = {"FLASH_ATTN_REHEARSAL": str(wheel)}
    session.run("pytest", "tests/build/release/test_rehearsal.py", env=environ)


@nox.session(requires=["build_dev"], default=False)
def deviation(session: nox.Session) -> None:
    """Run quick deviation studies into build/deviation (-- ARGS: other arguments)."""
    install_wheel(session, the_wheel(session, "dist/dev"))
    install(session, "test")  # matplotlib
    install_lab(session)
    arguments = session.posargs or ["report", "--quick", "--out", "build/deviation"]
    session.run("flash-attn-deterministic", "deviation", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, C++ format, spelling, README tables and configuration files."""
    install(session, "torch", "dev")  # mypy reads torch's types
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("clang-format", "--dry-run", "--Werror", *native_sources())
    session.run("codespell")
    session.run("python", "-m", "tests.benchmarks.tables", "--check", env=TOOLS)
    session.run("validate-pyproject", "pyproject.toml", silent=True)
    workflows = [str(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    dependabot = str(ROOT / ".github" / "dependabot.yml")
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", dependabot)
    session.run("zizmor", "--offline", "--quiet", ".github")
    session.run("actionlint", *workflows)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Update locks/, versions and hashes of everything that is installed, from pyproject.toml."""
    session.install("uv==0.13.9")
    compile_ = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    compile_ += ["--no-header", "--no-annotate", "--upgrade"]
    for name, python in LOCKS.items():
        arguments = ["--python-version", python, "--group", f"pyproject.toml:{name}"]
        # One version of each package: the lists before this one bind it.
        for before in list(LOCKS)[: list(LOCKS).index(name)]:
            files = ("torch", "torch_cpu", "torch_cuda") if before == "torch" else (before,)
            arguments += [f"--constraint=locks/{file}.txt" for file in files]
        said = session.run(*compile_, *arguments, silent=True)
        # A line for each package.
        lines = re.sub(r" \\\n +", " ", str(said)).splitlines(keepends=True)
        parts = {name: lines}
        if name == "torch":  # alone, for its headers; what all its builds need; what CUDA's needs
            torch = [line for line in lines if line.startswith("torch==")]
            cuda = [line for line in lines if re.match("cuda-|nvidia-|triton=", line)]
            parts["torch"] = [f"{line.rstrip()} {CPU_TORCH}\n" for line in torch]
            parts["torch_cpu"] = [line for line in lines if line not in torch + cuda]
            parts["torch_cuda"] = cuda
        for part, packages in parts.items():
            Path(ROOT, "locks", f"{part}.txt").write_text("".join(packages))


@nox.session(default=False)
@nox.parametrize("torch", ["2.10", "2.12", "2.13", "2.15"])
@nox.parametrize("toolkit", ["13.0", "13.5"])
def matrix(session: nox.Session, toolkit: str, torch: str) -> None:
    """Test a dev wheel of one CUDA toolkit under one torch: gigabytes (--report FILE)."""
    folder = f"dist/cuda-{toolkit}"
    if not list(ROOT.glob(f"{folder}/*.whl")):
        install(session, "build", "torch")
        session.install(f"cuda-toolkit[nvcc,cccl]=={toolkit}.*")
        # This toolkit's, whatever nvcc the machine has.
        nvcc = run_tool(session, "compile.toolchain", "--packages", silent=True)
        where = ["--out-dir", folder, "--build-dir", f"build/cuda-{toolkit}"]
        run_tool(session, "compile.build", "--preset", "dev", *where, cudacxx=nvcc)
    session.install(str(the_wheel(session, folder)), f"torch=={torch}.*")
    install(session, "test")
    install_lab(session)
    session.run("pytest", "tests/unit", "lab/tests")


@nox.session(default=False)
def baseline(session: nox.Session) -> None:
    """Build upstream's own kernels, for comparisons; they are not part of the wheel."""
    install_compilers(session)
    session.run("python", "-m", "tests.benchmarks.build_baseline", *session.posargs, env=TOOLS)


# Dependency groups that are locked, and the oldest Python of each.
LOCKS = {
    "torch": "3.10", "test": "3.10", "dev": "3.11", "build": "3.11", "cuda": "3.11",
    "cuda12": "3.11", "gate": "3.11", "nox": "3.11", "publish": "3.11",
}  # fmt: skip
# torch's own build for CPUs (cp311, x86-64): pip prefers it where its settings offer it.
CPU_TORCH = "--hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"


def run_build(session: nox.Session, *arguments: str) -> None:
    """Installs compilers and builds a wheel."""
    # What decides the compilers; the module reads the rest, and refuses abbreviations, too.
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--locked", action="store_true")
    parser.add_argument("--cuda")
    parser.add_argument("--arch", default=platform.machine())
    given, _ = parser.parse_known_args(arguments)
    install_compilers(session, locked=given.locked, cuda12=given.cuda is not None)
    if given.arch != platform.machine():
        install(session, "cuda")
        options = ["--platform", f"manylinux2014_{given.arch}", "--only-binary", ":all:"]
        options += ["--target", str(Path(session.virtualenv.location, given.arch)), "--upgrade"]
        session.install("--no-deps", *options, "--require-hashes", "-r", "locks/cuda.txt")
    run_tool(session, "compile.build", *arguments)


def run_gate(session: nox.Session, name: str, *arguments: str) -> None:
    """Runs a module of flash_attn_build that gates; --locked: with tools by hash."""
    install(session, "gate")
    others = [argument for argument in arguments if argument != "--locked"]
    session.run("python", "-m", f"flash_attn_build.{name}", *others, env=TOOLS)


def run_verify(session: nox.Session, wheel: Path, *arguments: str) -> Path:
    """Installs a wheel with its requirements only, and verifies it; returns the report's folder."""
    install_wheel(session, wheel)
    runs = wheel.parent / "verification"
    # Each run has its own folder: a failed report blocks a release, and must not be overwritten.
    numbers = [int(path.name) for path in runs.glob("*") if path.name.isdecimal()]
    out = runs / str(max(numbers, default=0) + 1)
    out.mkdir(parents=True)
    command = ["flash-attn-deterministic", "verify", "--wheel", str(wheel), "--out", str(out)]
    # The installed package, whatever the environment would have Python import.
    session.run(*command, *arguments, env={"PYTHONPATH": ""})
    return out


def install_compilers(session: nox.Session, *, locked: bool = False, cuda12: bool = False) -> None:
    """Installs what compiling needs, a CUDA compiler included where the machine has none."""
    if not re.fullmatch(NVCC_PATH, str(ROOT)):
        session.error(
            f"nvcc does not compile in {str(ROOT)!r}: move this folder to a path of "
            "letters, digits and . _ - + @ only"
        )
    install(session, "build", "torch")  # only torch's headers are read
    if cuda12:
        install(session, "cuda12")
    # A locked build compiles with the locked compiler, whatever the machine has.
    elif locked or not run_tool(session, "compile.toolchain", silent=True):
        install(session, "cuda")


def install(session: nox.Session, *names: str) -> None:
    """Installs dependency groups: the versions and hashes in locks/, or the newest."""
    if sys.version_info < BUILD_PYTHON:
        floor = ".".join(map(str, BUILD_PYTHON))
        session.error(f"building needs Python {floor} or newer; the wheel runs on 3.10 too")
    for name in names:
        if NEWEST:
            # torch's headers alone are read, or its libraries come with the wheel's requirements.
            session.install(*(["--no-deps", "torch"] if name == "torch" else groups(name)))
        else:
            session.install("--no-deps", "--require-hashes", "-r", f"locks/{name}.txt")


def install_wheel(session: nox.Session, wheel: Path) -> None:
    """Installs a wheel with torch and torch's requirements only."""
    if NEWEST:
        session.install(str(wheel))
        return
    install(session, "torch", "torch_cpu")
    requires = "import importlib.metadata as m; print(*m.requires('torch'))"
    if "nvidia" in str(session.run("python", "-c", requires, silent=True)):
        install(session, "torch_cuda")  # gigabytes; torch's builds for CPUs do without
    session.install("--no-deps", str(wheel))
    session.run("python", "-m", "pip", "check")


def install_lab(session: nox.Session) -> None:
    """Installs flash-attn-deterministic-lab from its folder; torch brings setuptools."""
    session.install("--no-deps", "--no-build-isolation", str(ROOT / "lab"))


def run_tool(session: nox.Session, name: str, *arguments: str, silent: bool = False) -> str:
    """Runs a module of flash_attn_build; returns what it printed, if silent."""
    command = ["python", "-m", f"flash_attn_build.{name}", *arguments]
    # SIGTERM would end nox and leave the compilers running; now it does what Ctrl-C does. After
    # half a second nox would kill the build, before it has removed its files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    said = session.run(
        *command, env=TOOLS, silent=silent, interrupt_timeout=3, terminate_timeout=30
    )
    return str(said).strip() if silent else ""


def wheels(session: nox.Session, folder: str) -> list[Path]:
    """Finds the wheels in a folder, oldest first; fails where there is none."""
    found = sorted((ROOT / folder).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        session.error(f"{folder}: expected a wheel, found none; build one")
    return found


def the_wheel(session: nox.Session, folder: str) -> Path:
    """Finds the only wheel in a folder (in dist/dev the newest), or fails with advice."""
    found = wheels(session, folder)
    if folder != "dist/dev" and len(found) > 1:  # after a change of the version, there are two
        names = ", ".join(wheel.name for wheel in found)
        session.error(f"{folder}: expected one wheel, found {names}; remove others")
    return found[-1]


def groups(*names: str) -> tuple[str, ...]:
    """Requirements of dependency groups in pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def native_sources() -> list[str]:
    """C++ and CUDA files of the kernels and of the tests."""
    found = (path for folder in ("cpp", "tests") for path in (ROOT / folder).rglob("*"))
    suffixes = (".cpp", ".h", ".cu", ".cuh")
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix in suffixes)


if __name__ == "__main__":
    nox.main()
