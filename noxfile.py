# /// script
# requires-python = ">=3.10"
# dependencies = ["nox>=2025.10.16"]
# ///
"""The ways into this project: `nox -s build` makes the wheel, `nox -s test` tests it."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.10.16"
# pip, so that the user's own pip configuration (mirrors, proxies, local wheels) counts.
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "test"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TOOLS = {"PYTHONPATH": str(ROOT / "python")}  # flash_attn_build


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheel into dist/ (-- --preset dev: a small one, in minutes)."""
    install_compilers(session)
    session.run("python", "-m", "flash_attn_build.build", *session.posargs, env=TOOLS)


@nox.session(default=False)
def build_dev(session: nox.Session) -> None:
    """Build the small wheel that `test` tests into dist/dev/."""
    install_compilers(session)
    session.run("python", "-m", "flash_attn_build.build", "--preset", "dev", env=TOOLS)


@nox.session(requires=["build_dev"])
def test(session: nox.Session) -> None:
    """Test the small wheel, installed in a clean environment (-- ARGS: pytest's)."""
    (wheel,) = (ROOT / "dist" / "dev").glob("*.whl")
    # With nothing but its own requirements first: it must not live on what the tests bring.
    session.install(str(wheel), *groups("torch"))
    session.run("flash-attn-deterministic", "info")
    session.install(*groups("test"))
    arguments = session.posargs or ["tests"]
    session.run("pytest", *arguments, env={"FLASH_ATTN_WHEEL": str(wheel)})


@nox.session(requires=["build_dev"], default=False)
def verify_dev(session: nox.Session) -> None:
    """Verify the small wheel on the CPU, in a minute or two."""
    (wheel,) = (ROOT / "dist" / "dev").glob("*.whl")
    run_verify(session, wheel, "--device", "cpu", "--quick")


@nox.session(default=False)
def verify(session: nox.Session) -> None:
    """Verify the wheel in dist/, installed in a clean environment, on this machine's GPU."""
    run_verify(session, release_wheel(session), *session.posargs)


@nox.session(default=False)
def conformance(session: nox.Session) -> None:
    """Run upstream's own tests against the wheel in dist/ on this GPU (-- --seconds S --seed N)."""
    session.install(str(release_wheel(session)), *groups("torch", "conformance"))
    # The installed package: tests.conformance finds the build's tools by itself.
    session.run("python", "-m", "tests.conformance", *session.posargs, env={"PYTHONPATH": ""})


@nox.session(default=False)
def digests(session: nox.Session) -> None:
    """List the sha256 of the wheels in dist/ and their manifests, as a CI's output."""
    session.run("python", "-m", "flash_attn_build.built", *session.posargs, env=TOOLS)


@nox.session(default=False)
def gate(session: nox.Session) -> None:
    """Ask the gate whether the wheels in dist/ may be published."""
    session.install(*groups("publish"))
    session.run(
        "python", "-m", "flash_attn_build.release_page", "--check", *session.posargs, env=TOOLS
    )


@nox.session(default=False)
def publish(session: nox.Session) -> None:
    """Upload the wheel in dist/ to a package server, if the gate lets it (-- --dry-run)."""
    session.install(*groups("publish"))
    session.run("python", "-m", "flash_attn_build.publish", *session.posargs, env=TOOLS)


@nox.session(default=False)
def release_page(session: nox.Session) -> None:
    """Make the release page of the wheels in dist/, if the gate lets them (-- --dry-run)."""
    session.install(*groups("publish"))
    session.run("python", "-m", "flash_attn_build.release_page", *session.posargs, env=TOOLS)


@nox.session(default=False)
def index(session: nox.Session) -> None:
    """Write the static package index of all releases into build/index."""
    session.install(*groups("publish"))
    session.run("python", "-m", "flash_attn_build.index", *session.posargs, env=TOOLS)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build the release's wheels in manylinux images (-- 13.0: of one CUDA toolkit)."""
    session.install(*groups("wheels"))
    session.run("python", "-m", "flash_attn_build.wheels", *session.posargs, env=TOOLS)


@nox.session(default=False)
def toolkits(session: nox.Session) -> None:
    """List the CUDA toolkits that wheels are released for, as a CI's matrix."""
    session.run("python", "-m", "flash_attn_build.wheels", "--list", env=TOOLS)


@nox.session(requires=["build_dev"], default=False)
def deviation(session: nox.Session) -> None:
    """Run quick deviation studies and their report into build/deviation (-- ARGS: instead)."""
    (wheel,) = (ROOT / "dist" / "dev").glob("*.whl")
    session.install(f"{wheel}[deviation]", *groups("torch"))
    arguments = session.posargs or ["report", "--quick", "--out", "build/deviation"]
    session.run("flash-attn-deterministic", "deviation", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, C++ format, spelling, README tables and configuration files."""
    session.install(*groups("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("clang-format", "--dry-run", "--Werror", *sources("cpp", ".cpp .h .cu .cuh"))
    session.run("codespell")
    session.run("python", "-m", "flash_attn_build.tables", "--check", env=TOOLS)
    session.run("validate-pyproject", "pyproject.toml", silent=True)
    workflows = [str(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    dependabot = str(ROOT / ".github" / "dependabot.yml")
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", dependabot)
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Build for several CUDA toolkits, test each wheel under several torches (gigabytes)."""
    session.install(*groups("matrix"))
    session.run("python", "-m", "flash_attn_build.matrix", *session.posargs, env=TOOLS)


@nox.session(default=False)
def baseline(session: nox.Session) -> None:
    """Build upstream's own kernels, for comparisons; never part of the wheel."""
    install_compilers(session)
    session.run("python", "-m", "flash_attn_build.baseline", *session.posargs, env=TOOLS)


def release_wheel(session: nox.Session) -> Path:
    """Returns the wheel in dist/, or in a folder there for one CUDA toolkit."""
    wheels = [*ROOT.glob("dist/*.whl"), *ROOT.glob("dist/cu[0-9]*/*.whl")]
    if len(wheels) != 1:
        session.error(f"dist: expected one wheel, found {len(wheels)}; `nox -s build` makes it")
    return wheels[0]


def run_verify(session: nox.Session, wheel: Path, *arguments: str) -> None:
    """Installs a wheel, with nothing but its requirements, and lets it verify itself."""
    session.install(str(wheel), *groups("torch"))
    command = ["flash-attn-deterministic", "verify", "--wheel", str(wheel)]
    next_folder = ["python", "-m", "flash_attn_build.verification_folder"]
    made = session.run(*next_folder, str(wheel.parent / "verification"), env=TOOLS, silent=True)
    out = str(made).strip()
    # The installed package, whatever the surroundings would have Python import.
    session.run(*command, "--out", out, *arguments, env={"PYTHONPATH": ""})


def install_compilers(session: nox.Session) -> None:
    """Installs what compiling needs, a CUDA compiler included where the machine has none."""
    session.install(*groups("build"))
    # Only torch's headers are read: without its dependencies, which are gigabytes.
    session.install("--no-deps", *groups("torch"))
    find = ["python", "-m", "flash_attn_build.toolchain"]
    found = session.run_install(*find, env=TOOLS, silent=True)
    if not str(found).strip():
        session.install(*groups("cuda"))


def groups(*names: str) -> tuple[str, ...]:
    """Requirements of dependency groups in pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def sources(folder: str, suffixes: str) -> list[str]:
    """Files under a folder, by suffix."""
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes.split())
    return sorted(str(path.relative_to(ROOT)) for path in found)


if __name__ == "__main__":
    nox.main()
