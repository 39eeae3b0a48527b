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
import subprocess
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
# The Python that builds a wheel in its image, by CUDA: [tool.cibuildwheel] tells them apart by it.
WHEELS = {"13": "cp312", "12": "cp311"}
BUILD_PYTHON = (3, 11)  # the oldest that builds and gates: torch-abi-audit needs it
# NEWEST=1: the newest versions that pyproject.toml allows, and the newest torch, instead of locks/.
NEWEST = bool(os.environ.get("NEWEST"))
HAS_GPU = Path("/dev/nvidiactl").exists()


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheel into dist/ (-- --preset dev: a small one, in minutes)."""
    run_build(session, *session.posargs)


@nox.session(name="wheels", default=False)
def release_wheels(session: nox.Session) -> None:
    """Build the release's wheel of this machine in its manylinux image (-- --cuda 12: +cu12)."""
    parser = argparse.ArgumentParser(prog="nox -s wheels --")
    parser.add_argument("--cuda", choices=WHEELS, default="13")
    cuda = parser.parse_args(session.posargs).cuda
    install(session, "wheels")
    only = f"{WHEELS[cuda]}-manylinux_{platform.machine()}"
    for arch in ("x86_64", "aarch64"):
        plan = ["cibuildwheel", "--platform", "linux", "--archs", arch, "--print-build-identifiers"]
        found = str(session.run(*plan, silent=True)).split()
        session.log(f"{arch}: {', '.join(found)}")
        if sorted(found) != sorted(f"{python}-manylinux_{arch}" for python in WHEELS.values()):
            session.error(f"expected one wheel of each CUDA for {arch}, planned are {found}")
    engine = next((name for name in ("docker", "podman") if _runs(name)), None)
    if engine is None:
        session.skip(f"{only} is not built: no container engine runs here")
    if cuda == "12":
        session.run("python", "-m", "flash_attn_build.compile.debian_cuda", env=TOOLS)
    epoch = str(session.run("git", "log", "-1", "--format=%ct", external=True, silent=True)).strip()
    environ = {"SOURCE_DATE_EPOCH": epoch, "CIBW_CONTAINER_ENGINE": engine}
    session.run("cibuildwheel", "--only", only, "--output-dir", "dist", env=environ)


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
    environ = {"FLASH_ATTN_WHEEL": str(wheel), "OMP_NUM_THREADS": "1"}
    session.run("pytest", *(session.posargs or workers()), env=environ)


@nox.session(python=PYTHONS, default=False)
def test_python(session: nox.Session) -> None:
    """Test the small wheel in dist/dev under another Python, without a build."""
    install_wheel(session, the_wheel(session, "dist/dev"))
    install(session, "test")
    install_lab(session)
    session.run("pytest", *(session.posargs or ["tests/unit", "lab/tests", *workers()]))


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
    """Verify this machine's wheels in dist/ on its GPU: their own `verify`, then tests/gpu."""
    for wheel in wheels(session, "dist", f"*{platform.machine()}.whl"):
        out = run_verify(session, wheel, *session.posargs)
        if "cpu" in session.posargs:
            continue
        install(session, "test")
        install_lab(session)
        # The gate reads which wheel it was.
        suite = f"junit_suite_name=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        tests = ["tests/gpu", "tests/unit/interface/test_mistakes.py"]
        tests += ["-o", suite, f"--junit-xml={out / 'gpu-tests.xml'}"]
        # Options of pytest, or of ours by both of their names, leave out tests or change what runs.
        options = ("PYTEST_", "FLASH_ATTENTION_", "FA2_DETERMINISTIC", "FA2_SPLIT_SIZE")
        session.run("pytest", *tests, env=without("PYTHON", *options))


@nox.session(default=False)
def conformance(session: nox.Session) -> None:
    """Run upstream's own tests against the wheel in dist/ on this GPU (-- --seconds S --seed N)."""
    session.install(str(the_wheel(session, "dist")), *groups("torch", "conformance"))
    # The installed package: tests.conformance finds the build's tools by itself.
    session.run("python", "-m", "tests.conformance", *session.posargs, env={"PYTHONPATH": ""})


@nox.session(requires=["build_dev"], default=False)
def vllm(session: nox.Session) -> None:
    """Check the attention backend against vLLM's own classes, on the CPU (gigabytes)."""
    check_framework(session, "vllm")


@nox.session(requires=["build_dev"], default=False)
def sglang(session: nox.Session) -> None:
    """Check the attention backend against SGLang's own classes, on the CPU (gigabytes)."""
    check_framework(session, "sglang")


@nox.session(requires=["build_dev"], default=False)
def torchtitan(session: nox.Session) -> None:
    """Check the kernels under TorchTitan's own attention, on the CPU."""
    check_framework(session, "torchtitan")


@nox.session(default=False)
def gate(session: nox.Session) -> None:
    """Run the release gate; write the release into build/to-publish."""
    run_gate(session, "release", *session.posargs)


@nox.session(default=False)
def publish(session: nox.Session) -> None:
    """Run the gate, then upload what it passed (-- --repository NAME: to another server)."""
    # No path, nor another option of twine's: what is uploaded is what the gate wrote.
    parser = argparse.ArgumentParser(prog="nox -s publish --", allow_abbrev=False)
    parser.add_argument("--repository", metavar="NAME", help="of twine's configuration")
    repository = parser.parse_args(session.posargs).repository
    if repository == "":
        parser.error("--repository: expected a name, got an empty one")
    options = [] if repository is None else ["--repository", repository]
    # twine would take the server of this variable before the one that is asked for.
    environ = without("TWINE_REPOSITORY") if options else None
    install(session, "publish")
    run_gate(session, "release")
    folder = ROOT / "build" / "to-publish"
    # Those that the gate listed, whatever lies beside them by now.
    paths = re.findall("  (package-index/.*)", Path(folder, "SHA256SUMS").read_text())
    with session.chdir(folder):
        session.run("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS", external=True)
        session.run("twine", "upload", "--non-interactive", *options, "--", *paths, env=environ)


@nox.session(default=False)
def index(session: nox.Session) -> None:
    """Write the static package index of all releases into build/index."""
    run_gate(session, "release.index", *session.posargs)


@nox.session(default=False)
def rehearse(session: nox.Session) -> None:
    """Rehearse a release from tag to pip: the wheel in dist/, or, where none is, the dev wheel."""
    folder = "dist"
    if not list((ROOT / folder).glob("*.whl")):
        folder = "dist/dev"
        run_build(session, "--preset", "dev")
    wheel = the_wheel(session, folder)
    # As a user's: torch is there, and nothing of the tests.
    fresh = Path(session.create_tmp(), "fresh", "bin", "python").absolute()
    session.run("python", "-m", "venv", "--clear", "--without-pip", str(fresh.parents[1]))
    session.env["PIP_PYTHON"] = str(fresh)
    install(session, "torch_requires")
    install_torch(session, "torch_cuda")
    del session.env["PIP_PYTHON"]
    install(session, "dev")
    environ = {"FLASH_ATTN_REHEARSAL": str(wheel), "FLASH_ATTN_FRESH": str(fresh)}
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
    install_torch(session)  # mypy reads its types
    install(session, "dev")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("clang-format", "--dry-run", "--Werror", *native_sources())
    session.run("codespell")
    session.run("python", "-m", "tests.api", "--check")
    session.run("python", "-m", "tests.benchmarks.tables", "--check", env=TOOLS)
    session.run("validate-pyproject", "pyproject.toml", "lab/pyproject.toml", silent=True)
    workflows = [str(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    schemas = [str(path) for path in sorted(ROOT.glob("docs/*.schema.json"))]
    session.run("check-jsonschema", "--check-metaschema", *schemas)
    dependabot = str(ROOT / ".github" / "dependabot.yml")
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", dependabot)
    session.run("zizmor", "--offline", "--quiet", ".github")
    session.run("actionlint", *workflows)
    # Last: after a change of kernels it names the results that have to be taken again.
    session.run("python", "-m", "tests.results", env=TOOLS)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Update locks/, versions and hashes of everything that is installed, from pyproject.toml."""
    session.install("uv==0.13.9")
    compile_ = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    compile_ += ["--no-header", "--no-annotate", "--upgrade"]

    def lines_of(*arguments: str) -> list[str]:
        said = session.run(*compile_, *arguments, silent=True)
        return re.sub(r" \\\n +", " ", str(said)).splitlines(keepends=True)  # one for each package

    for name, python in LOCKS.items():
        arguments = ["--python-version", python, "--group", f"pyproject.toml:{name}"]
        # One version of each package: the lists before this one bind it.
        for before in list(LOCKS)[: list(LOCKS).index(name)]:
            files = ("torch", "torch_requires", "torch_cuda") if before == "torch" else (before,)
            arguments += [f"--constraint=locks/{file}.txt" for file in files]
        lines = lines_of(*arguments)
        parts = {name: lines}
        # Alone, for its headers; the build for CPUs, where pip's settings offer it; what all builds
        # need; what CUDA's needs.
        if name == "torch":
            torch = [line for line in lines if line.startswith("torch==")]
            cuda = [line for line in lines if re.match("cuda-|nvidia-|triton=", line)]
            parts["torch"] = torch
            own = f"{torch[0].split()[0]}+cpu"
            download = ["pip", "download", "--no-deps", "--dest", session.create_tmp(), own]
            session.run("python", "-m", *download, success_codes=(0, 1))
            found = [path.read_bytes() for path in Path(session.create_tmp()).glob("torch-*.whl")]
            digests = [f" --hash=sha256:{hashlib.sha256(data).hexdigest()}" for data in found]
            parts["torch_cpu"] = [f"{own}{digest}\n" for digest in digests]
            parts["torch_requires"] = [line for line in lines if line not in torch + cuda]
            parts["torch_cuda"] = cuda
        for part, packages in parts.items():
            Path(ROOT, "locks", f"{part}.txt").write_text("".join(packages))
    for version in TORCHES:
        wanted = Path(session.create_tmp(), "torch.in")
        wanted.write_text(f"torch=={version}.*\n")
        python = "3.10" if version < "2.15" else "3.11"
        lines = lines_of("--python-version", python, "--constraint=locks/test.txt", str(wanted))
        Path(ROOT, "locks", "matrix", f"torch-{version}.txt").write_text("".join(lines))


# CUDA, torch and Python of the matrix: the oldest Python of each torch, the newest, without a GIL.
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
CELLS = [
    nox.param(python, cuda, torch, id=f"cuda{cuda}-torch{torch}-{python}")
    for cuda in ("12", "13")
    for torch in TORCHES
    for python in ("3.10" if torch < "2.15" else "3.11", "3.14", "3.14t")
]


@nox.session(default=False)
@nox.parametrize("python,cuda,torch", CELLS)
def matrix(session: nox.Session, cuda: str, torch: str) -> None:
    """Test the dev wheel of a CUDA under a torch and a Python, until it has passed (gigabytes)."""
    folder = f"dist/cuda{cuda}"
    # Each time: what is compiled stays, and a wheel of other sources is never the one tested.
    options = ["--preset", "dev", "--locked"]
    options += ["--out-dir", folder, "--build-dir", f"build/cuda{cuda}"]
    options += ["--cuda", "12", "--local", "cu12"] if cuda == "12" else []
    build = ["-m", "nox", "--reuse-existing-virtualenvs", "--session", "build", "--", *options]
    session.run(sys.executable, *build, external=True)
    wheel = the_wheel(session, folder)
    locks = [f"locks/matrix/torch-{torch}.txt", "locks/test.txt"]
    inputs = [wheel, *(ROOT / lock for lock in locks)]
    state = " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs)
    passed = ROOT / "build" / "matrix" / f"{cuda}-{torch}-{session.python}"
    if passed.exists() and passed.read_text() == state:
        session.skip(f"{wheel.name} of the same bytes passed under the same packages")
    session.install("--no-deps", "--require-hashes", "-r", locks[0], "-r", locks[1])
    session.install("--no-deps", "--force-reinstall", str(wheel))
    session.run("python", "-m", "pip", "check")
    session.run("pytest", *(session.posargs or ["tests/unit"]))
    if not session.posargs:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.write_text(state)


@nox.session(python=False, default=False)
@nox.parametrize("nvcc", ["packages", "machine"])
@nox.parametrize("suite", ["bookworm", "trixie", "sid"])
def fresh(session: nox.Session, suite: str, nvcc: str) -> None:
    """Run README's commands, or the given one, in a new Debian: as root, with debootstrap."""
    environ = {}
    if nvcc == "machine":
        environ["NVCC"] = shutil.which("nvcc") or session.error("nvcc: not on PATH")
    readme = re.findall(r"\.ci/nox -s \w+", (ROOT / "README.md").read_text())
    for command in [session.posargs] if session.posargs else [line.split() for line in readme]:
        session.run(".ci/fresh", suite, *command, env=environ, external=True)


@nox.session(default=False)
def baseline(session: nox.Session) -> None:
    """Build upstream's own kernels, for comparisons; they are not part of the wheel."""
    install_compilers(session)
    session.run("python", "-m", "tests.benchmarks.build_baseline", *session.posargs, env=TOOLS)


# Dependency groups that are locked, and the oldest Python of each.
LOCKS = {
    "torch": "3.10", "test": "3.10", "dev": "3.11", "build": "3.11", "cuda": "3.11",
    "cuda12": "3.11", "gate": "3.11", "nox": "3.11", "publish": "3.11", "wheels": "3.11",
}  # fmt: skip


# Python compiles what is imported.
LOCKED = ("--no-compile", "--no-deps", "--require-hashes")
WHEELS_ONLY = ("--only-binary", ":all:")


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
    """Runs a module of flash_attn_build that gates."""
    install(session, "gate")
    # Compiled code that lies in the tree is nobody's, and not in the commit: it is not run.
    environ = {**TOOLS, "PYTHONPYCACHEPREFIX": session.create_tmp()}
    session.run("python", "-m", f"flash_attn_build.{name}", *arguments, env=environ)


def run_verify(session: nox.Session, wheel: Path, *arguments: str) -> Path:
    """Installs a wheel with its requirements only, and verifies it; returns the report's folder."""
    install_wheel(session, wheel)
    runs = wheel.parent / "verification"
    # Each run has its own folder: a failed report blocks a release, and must not be overwritten.
    numbers = [int(path.name) for path in runs.glob("*") if path.name.isdecimal()]
    out = runs / str(max(numbers, default=0) + 1)
    out.mkdir(parents=True)
    command = ["flash-attn-deterministic", "verify", "--wheel", str(wheel), "--out", str(out)]
    # The installed package with all of its checks, whatever the environment would have Python do.
    session.run(*command, *arguments, env=without("PYTHON"))
    return out


def without(*prefixes: str) -> dict[str, None]:
    """Returns what takes variables out of the environment of a command."""
    return dict.fromkeys(name for name in os.environ if name.startswith(prefixes))


def install_compilers(session: nox.Session, *, locked: bool = False, cuda12: bool = False) -> None:
    """Installs what compiling needs, a CUDA compiler included where the machine has none."""
    install(session, "build")
    install_torch(session)  # only its headers are read
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
            # What builds and publishes runs no setup.py of a package.
            wheels_only = () if name == "dev" else WHEELS_ONLY
            session.install(*LOCKED, *wheels_only, "-r", f"locks/{name}.txt")


def install_wheel(session: nox.Session, wheel: Path) -> None:
    """Installs a wheel with torch and torch's requirements only."""
    if NEWEST:
        session.install(str(wheel))
        return
    install(session, "torch_requires")
    install_torch(session, "torch_cuda")
    # With `nox -R` one of the same version may be there.
    session.install("--no-deps", "--force-reinstall", str(wheel))
    session.run("python", "-m", "pip", "check")


def install_torch(session: nox.Session, *others: str) -> None:
    """Installs torch: its own build for CPUs, or the index's with other locked lists.

    The one takes 0.2 GB, the other 3. Pip's settings may offer it; it is asked for by itself, since
    pip prefers what an index announces by hash to the file of a folder.
    """
    missing = "No matching distribution"
    said = missing
    if not NEWEST and not HAS_GPU:
        pip = ["python", "-m", "pip", "install", *LOCKED, *WHEELS_ONLY, "-r", "locks/torch_cpu.txt"]
        said = str(session.run(*pip, silent=True, success_codes=(0, 1)))
    if missing in said:
        install(session, "torch", *others)
    elif "ERROR" in said:  # a file of another hash, say: not a reason to take another one
        session.error(said)


def install_lab(session: nox.Session) -> None:
    """Installs flash-attn-deterministic-lab from its folder, by the locked setuptools."""
    options = [] if NEWEST else ["--no-deps", "--no-build-isolation"]
    # setuptools would pack what an earlier build left there.
    shutil.rmtree(ROOT / "lab" / "build", ignore_errors=True)
    session.install(*options, str(ROOT / "lab"))
    shutil.rmtree(ROOT / "lab" / "build", ignore_errors=True)


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


def wheels(session: nox.Session, folder: str, pattern: str = "*.whl") -> list[Path]:
    """Finds the wheels in a folder, oldest first; fails where there is none."""
    found = sorted((ROOT / folder).glob(pattern), key=lambda path: path.stat().st_mtime)
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


def check_framework(session: nox.Session, name: str) -> None:
    """Runs the tests with a framework, which brings the torch that it wants."""
    wanted = [re.sub("==.*", "", one) if NEWEST else one for one in groups(name)]
    session.install(str(the_wheel(session, "dist/dev")), *wanted)
    # The framework's own warnings are no errors of ours.
    file = f"tests/unit/integrations/test_{name}.py"
    session.run("pytest", "-W", "default", file, *session.posargs)


def groups(*names: str) -> tuple[str, ...]:
    """Requirements of dependency groups in pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def _runs(engine: str) -> bool:
    """Whether a container engine is there and answers; its client alone is not enough."""
    if found := shutil.which(engine):
        return subprocess.run([found, "info"], capture_output=True).returncode == 0
    return False


def workers() -> list[str]:
    """pytest's options for a worker per core; tests of a GPU run one after another."""
    parallel = ["--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal"]
    return [] if HAS_GPU else parallel


def native_sources() -> list[str]:
    """C++ and CUDA files of the kernels and of the tests."""
    found = (path for folder in ("cpp", "tests") for path in (ROOT / folder).rglob("*"))
    suffixes = (".cpp", ".h", ".cu", ".cuh")
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix in suffixes)


if __name__ == "__main__":
    nox.main()
