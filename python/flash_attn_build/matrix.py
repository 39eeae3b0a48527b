"""Which CUDA toolkits build the wheel, and which torches run it: real installs, gigabytes.

`nox -s matrix` writes docs/results/matrix.json. A cell that could not run says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import files, toolchain
from .errors import BuildError, StepError
from .jobs import GIB

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "results" / "matrix.json"
TORCHES = ("2.10", "2.12", "2.13", "2.15")
OLDEST_TOOLKIT = "13.0"

# Free space wanted before an install starts, with room for what is being downloaded and unpacked.
TORCH_BYTES = 14 * GIB
TOOLKIT_BYTES = 4 * GIB

Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


@dataclass
class Wheel:
    """A row: one CUDA toolkit and the wheel it made.

    Attributes:
        toolkit: Series, such as "13.0".
        name: File name of the wheel; "" if there is none.
        sha256: Of the wheel.
        why: Why there is no wheel.
        path: Where it lies; not part of the report.
    """

    toolkit: str
    name: str = ""
    sha256: str = ""
    why: str = ""
    path: Path = field(default_factory=Path, repr=False)


@dataclass
class Cell:
    """One wheel's CPU tests under one torch.

    Attributes:
        toolkit: Series of the toolkit that made the wheel.
        torch: Series asked for, such as "2.10".
        status: "passed", "failed" or "not run".
        installed: Version of torch that was there, such as "2.10.0+cu128".
        passed: Number of tests that passed.
        failed: Number of tests that did not.
        skipped: Number of tests that asked for something that was not there.
        why: Why the cell failed or did not run.
    """

    toolkit: str
    torch: str
    status: str
    installed: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    why: str = ""


class Matrix:
    """Builds the wheels and fills the cells, one environment at a time."""

    def __init__(self, work: Path, preset: str, run: Run | None = None, root: Path = ROOT) -> None:
        """Prepares a matrix.

        Args:
            work: Folder for environments and wheels.
            preset: Preset to build the wheels with.
            run: Runs a command in an environment; `subprocess.run` if None.
            root: The source tree.
        """
        self.work, self.preset, self.root = work, preset, root
        self._run = run or _run

    def newest_toolkit(self) -> str:
        """Asks the package index, through pip, for the newest CUDA 13 toolkit.

        Returns:
            Its series, such as "13.2".

        Raises:
            StepError: pip finds none.
        """
        ask = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        done = self._pip(Path(sys.executable), *ask, "--report", "-", "cuda-toolkit==13.*")
        if done.returncode:
            raise StepError(f"no CUDA toolkit in the packages: {reason(done)}")
        version = json.loads(done.stdout)["install"][0]["metadata"]["version"]
        return ".".join(str(version).split(".")[:2])

    def build(self, toolkit: str) -> Wheel:
        """Builds the wheel with one toolkit.

        Args:
            toolkit: Its series, such as "13.0".

        Returns:
            The wheel, or why there is none.
        """
        if why := self._no_room(TOOLKIT_BYTES):
            return Wheel(toolkit, why=why)
        out = self.work / f"cuda-{toolkit}"
        folder = out / "environment"
        try:
            python = self._environment(folder)
            pyproject = str(self.root / "pyproject.toml")
            self._must(python, "install", "--group", f"{pyproject}:build")
            self._must(python, "install", "--no-deps", "--group", f"{pyproject}:torch")
            self._must(python, "install", f"{toolchain.PACKAGES}=={toolkit}.*")
            nvcc = next(folder.glob("lib/python*/site-packages/nvidia/cu*/bin/nvcc"), None)
            if nvcc is None:
                return Wheel(toolkit, why=f"{toolchain.PACKAGES}=={toolkit}.* brings no nvcc")
            command = [str(python), "-m", "flash_attn_build.build", "--preset", self.preset]
            command += ["--out-dir", str(out / "dist"), "--build-dir", str(out / "build")]
            environ = {"PYTHONPATH": str(self.root / "python"), "CUDACXX": str(nvcc)}
            # Ninja and CMake come from the environment's packages.
            environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            done = self._run(command, environ)
            if done.returncode:
                return Wheel(toolkit, why=reason(done))
            (path,) = (out / "dist").glob("*.whl")
        except StepError as error:
            return Wheel(toolkit, why=str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return Wheel(toolkit, path.name, digest, path=path)

    def test(self, wheels: Sequence[Wheel], torch: str) -> list[Cell]:
        """Runs every wheel's CPU tests under one torch.

        Args:
            wheels: The wheels.
            torch: Series of torch, such as "2.10".

        Returns:
            One cell per wheel.
        """

        def not_run(why: str) -> list[Cell]:
            return [Cell(wheel.toolkit, torch, "not run", why=why) for wheel in wheels]

        if not any(wheel.name for wheel in wheels):
            return not_run("no wheel")
        if why := self._no_room(TORCH_BYTES):
            return not_run(why)
        folder = self.work / f"torch-{torch}"
        try:
            python = self._environment(folder)
            tests = f"{self.root / 'pyproject.toml'}:test"
            self._must(python, "install", "--no-compile", f"torch=={torch}.*", "--group", tests)
            ask = "import importlib.metadata as m; print(m.version('torch'))"
            installed = self._run([str(python), "-c", ask], {}).stdout.strip()
            return [self._cell(python, wheel, torch, installed) for wheel in wheels]
        except StepError as error:
            return not_run(str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _cell(self, python: Path, wheel: Wheel, torch: str, installed: str) -> Cell:
        if not wheel.name:
            return Cell(wheel.toolkit, torch, "not run", installed, why="no wheel")
        self._must(python, "install", "--force-reinstall", "--no-deps", str(wheel.path))
        report = self.work / "report.xml"
        report.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", *self._tests(), "-m", "not gpu"]
        # Another torch may warn of what the pinned one does not.
        command += ["-W", "default", f"--junitxml={report}", "-p", "no:cacheprovider"]
        done = self._run(command, {"FLASH_ATTN_WHEEL": str(wheel.path)})
        if not report.exists():
            return Cell(wheel.toolkit, torch, "failed", installed, why=reason(done))
        results = xml.etree.ElementTree.parse(report).getroot()
        suites = list(results.iter("testsuite"))
        total, failures, errors, skipped = (
            sum(int(suite.get(key, "0")) for suite in suites)
            for key in ("tests", "failures", "errors", "skipped")
        )
        failed = failures + errors
        cell = Cell(wheel.toolkit, torch, "passed", installed, total - failed - skipped)
        cell.failed, cell.skipped = failed, skipped
        if done.returncode or failed or not cell.passed:
            wrong = [*results.iter("failure"), *results.iter("error")]
            cell.status = "failed"
            cell.why = wrong[0].get("message", "").partition("\n")[0] if wrong else reason(done)
        return cell

    def _tests(self) -> list[str]:
        """Tests of what is in the wheel: the build's own tools do not change with torch."""
        paths = sorted((self.root / "tests" / "unit").glob("test_*.py"))
        return [str(path) for path in paths if "flash_attn_build" not in path.read_text()]

    def _environment(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        done = self._run([sys.executable, "-m", "virtualenv", "--quiet", str(folder)], {})
        if done.returncode:
            raise StepError(f"virtualenv: {reason(done)}")
        return folder / "bin" / "python"

    def _must(self, python: Path, *arguments: str) -> None:
        done = self._pip(python, *arguments)
        if done.returncode:
            raise StepError(reason(done))

    def _pip(self, python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(python), "-m", "pip", *arguments], {})

    def _no_room(self, wanted: int) -> str:
        self.work.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.work).free
        if free >= wanted:
            return ""
        return f"disk: {free / GIB:.1f} GiB free, {wanted / GIB:.0f} GiB wanted"


def _run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    print("matrix:", " ".join(command), flush=True)
    # nox points PYTHONPATH at the source tree, which would hide the installed wheel.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        env={**inherited, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Picks the line that says why a command failed.

    Args:
        done: The command.

    Returns:
        Its last line that names an error, else its last line, else its exit status.
    """
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {done.returncode}"])[-1]


def table(wheels: Sequence[Wheel], cells: Sequence[Cell]) -> str:
    """Lays the matrix out as a Markdown table.

    Args:
        wheels: The rows.
        cells: The cells.

    Returns:
        The table, with the reasons below it.
    """
    torches = list(dict.fromkeys(cell.torch for cell in cells))
    # The version that was there says more than the series asked for: "2.10.0+cu128".
    names = {cell.torch: cell.torch for cell in cells}
    names |= {cell.torch: cell.installed for cell in cells if cell.installed}
    lines = ["| CUDA toolkit | " + " | ".join(f"torch {names[t]}" for t in torches) + " |"]
    lines.append("|---" * (len(torches) + 1) + "|")
    by_place = {(cell.toolkit, cell.torch): cell for cell in cells}
    for wheel in wheels:
        row = [by_place[wheel.toolkit, torch] for torch in torches]
        words = [f"{c.status} ({c.passed})" if c.status == "passed" else c.status for c in row]
        lines.append(f"| {wheel.toolkit} | " + " | ".join(words) + " |")
    reasons = [f"CUDA {w.toolkit}: no wheel: {w.why}" for w in wheels if w.why]
    reasons += [f"CUDA {c.toolkit}, torch {c.torch}: {c.why}" for c in cells if c.why]
    return "\n".join(lines + [""] * bool(reasons) + [f"- {reason}" for reason in reasons])


def save(path: Path, preset: str, wheels: Sequence[Wheel], cells: Sequence[Cell]) -> None:
    """Writes the matrix as far as it is known.

    Args:
        path: The JSON file.
        preset: Preset of the wheels.
        wheels: The rows.
        cells: The cells.
    """
    rows = [{k: v for k, v in asdict(wheel).items() if k != "path"} for wheel in wheels]
    python = ".".join(str(part) for part in sys.version_info[:3])
    files.write_json(
        path,
        {
            "schema": 1,
            "preset": preset,
            "python": python,
            "wheels": rows,
            "cells": [asdict(cell) for cell in cells],
        },
    )


def main() -> int:
    """Runs the matrix.

    Returns:
        Exit status: 1 if a wheel was not built or a cell failed or did not run.
    """
    parser = argparse.ArgumentParser(prog="nox -s matrix --", description=__doc__)
    parser.add_argument("--preset", default="release")
    parser.add_argument("--toolkits", nargs="+", help="such as 13.0 (13.0 and the newest 13.x)")
    parser.add_argument("--torches", nargs="+", default=list(TORCHES))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    matrix = Matrix(given.work.resolve(), given.preset)
    try:
        toolkits = given.toolkits or sorted({OLDEST_TOOLKIT, matrix.newest_toolkit()})
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    wheels = [matrix.build(toolkit) for toolkit in toolkits]
    cells: list[Cell] = []
    for torch in given.torches:
        cells += matrix.test(wheels, torch)
        save(given.result, given.preset, wheels, cells)  # a long run may be cut short
    print(table(wheels, cells))
    return 0 if all(cell.status == "passed" for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
