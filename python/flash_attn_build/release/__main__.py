"""Asks the gate about the wheels in dist/, and writes what is published into build/release."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..compile import manifest
from ..errors import RefusedError, exit_status
from ..files import exit_on_sigterm
from . import assets
from .gate import find_runs, find_wheels, judge
from .policy import POLICY
from .tree import read_tree

ROOT = Path(__file__).resolve().parents[3]


def release(
    dist: Path, reports: Path, out: Path, root: Path = ROOT, *, strays: bool = True
) -> None:
    """Asks the gate, and writes the files of the release if it is open.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        out: Folder for what is published; replaced as a whole, removed if the gate is shut.
        root: The source tree.
        strays: Whether there may be reports of other wheels.

    Raises:
        RefusedError: The gate does not let a wheel through; the message has every reason.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        # Copies, so that what is judged is what is published.
        copies = Path(name, "dist")
        copies.mkdir()
        for wheel in find_wheels(dist):
            for path in (wheel, manifest.path_of(wheel)):
                if path.exists():
                    shutil.copyfile(path, copies / path.name)
        wheels, runs, tree = find_wheels(copies), find_runs(reports), read_tree(root)
        verdicts = judge(wheels, runs, POLICY, tree, root, strays=strays)
        made = Path(name, "made")
        assets.write(verdicts, POLICY, root, made)
        made.rename(out)
    for verdict in verdicts.values():
        print(f"{verdict.wheel.path.name}: {verdict.wheel.sha256}: the gate is open")


def check_attestations(folder: Path, repository: str, commit: str, root: Path = ROOT) -> None:
    """Asks GitHub whether wheels and manifests were made by this project's build workflow.

    Args:
        folder: Folder with wheels and their manifests.
        repository: Such as "owner/name".
        commit: The commit that they must be built from.
        root: The source tree, for `gh` to run in.

    Raises:
        RefusedError: One was not; `gh` is not there; or there is nothing to ask about.
    """
    paths = [*find_wheels(folder), *(manifest.path_of(wheel) for wheel in find_wheels(folder))]
    if not paths:
        raise RefusedError(f"{folder}: holds no wheel")
    gh = shutil.which("gh")
    if gh is None:
        raise RefusedError("gh, GitHub's command line tool, is not on PATH; it checks attestations")
    for path in paths:
        command = [gh, "attestation", "verify", str(path), "--repo", repository]
        command += ["--signer-workflow", f"{repository}/.github/workflows/release.yml"]
        command += ["--deny-self-hosted-runners"]
        command += ["--source-digest", commit] if commit else []
        if subprocess.run(command, cwd=root, check=False).returncode:
            raise RefusedError(f"{path.name}: has no attestation of this project's build")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line.

    Args:
        arguments: Its words; those of the process if None.
        root: The source tree.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s gate --", description=__doc__)
    parser.add_argument("--dist", type=Path, default=root / "dist", help="wheels (dist)")
    parser.add_argument("--reports", type=Path, help="verification reports (those below --dist)")
    parser.add_argument(
        "--out", type=Path, default=root / "build" / "release", help="build/release"
    )
    parser.add_argument(
        "--attested", nargs=2, metavar=("OWNER/NAME", "COMMIT"),
        help="wheels and manifests must have attestations of that repository and commit",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    exit_on_sigterm()

    def work() -> None:
        if given.attested:
            check_attestations(given.dist, given.attested[0], given.attested[1], root)
        reports = given.reports or given.dist
        release(given.dist, reports, given.out.resolve(), root, strays=not given.attested)

    return exit_status(work, "Nothing may be published.")


if __name__ == "__main__":
    sys.exit(main())
