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
