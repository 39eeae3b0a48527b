"""Writes a static package index (PEP 503) of all releases: `nox -s index`.

It takes wheels, manifests and reports from the release pages, but believes none of them: each wheel
must have the attestation of this project's build, pass the checks of wheels, and be proven by its
reports; the newest by all that the policy demands, earlier ones by what they were asked then.
dumb-pypi writes the pages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.version import Version

from ..errors import RefusedError, StepError, exit_status
from ..files import exit_on_sigterm
from .__main__ import ROOT, check_attestations
from .candidate import Candidate, read_wheel
from .gate import find_wheels, proofs
from .policy import POLICY, Policy
from .report import read_report, read_schema

Attested = Callable[[Path], None]


def write_index(
    pages: Sequence[Path], out: Path, policy: Policy, schema: Mapping[str, Any], attested: Attested
) -> None:
    """Writes the index: `simple/` for wheels without a local version, `<label>/simple/` for others.

    Args:
        pages: A folder per release page, with its files.
        out: Folder for the index; it is replaced as a whole.
        policy: The release policy.
        schema: JSON Schema of reports.
        attested: Raises RefusedError if a folder's wheels have no attestation.

    Raises:
        RefusedError: A wheel is not one of ours, or lacks its proof.
        StepError: The pages could not be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name, "index")
        rows: dict[str, list[dict[str, str]]] = {}
        for page in pages:
            if not find_wheels(page):
                raise RefusedError(f"{page.name}: its release page holds no wheel")
            attested(page)
        found = [read_wheel(wheel) for page in pages for wheel in find_wheels(page)]
        newest = max((Version(wheel.version or "0") for wheel in found), default=None)
        for wheel in found:
            last = Version(wheel.version or "0") == newest
            _judge(wheel, policy if last else _earlier(policy, wheel), schema)
            rows.setdefault(wheel.local, []).append(
                _place(wheel.path, made / wheel.local / "packages")
            )
        if not rows:
            raise RefusedError("the index would be empty: there is no release")
        for label, packages in rows.items():
            _pages(made / label, packages)
        old = Path(name, "old")
        if out.exists():
            os.rename(out, old)
        try:
            os.rename(made, out)
        except OSError:
            if old.exists():
                os.rename(old, out)
            raise


def _earlier(policy: Policy, wheel: Candidate) -> Policy:
    """What an earlier release is held to: not what has been demanded only since."""
    known = policy.required_architectures.items()
    held = {name: gpus for name, gpus in known if name in wheel.architectures}
    return replace(policy, required_architectures=held, required_sections=(), required_checks=())


def _judge(wheel: Candidate, policy: Policy, schema: Mapping[str, Any]) -> None:
    """Holds a wheel to its manifest and its reports."""
    places = sorted(wheel.path.parent.glob(f"{wheel.path.name}.verification-*.json"))
    proven = proofs(wheel, [read_report(path, schema) for path in places], policy)
    reasons = [*wheel.faults, *proven.reasons]
    if not reasons and not proven.verified:
        reasons.append("no report proves any of its machine code")
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise RefusedError(f"{wheel.path.name} (sha256 {wheel.sha256}) lacks its proof:{lines}")


def _place(wheel: Path, packages: Path) -> dict[str, str]:
    """Puts a wheel and its metadata (PEP 658) into place; returns its row."""
    if (packages / wheel.name).exists():
        raise RefusedError(f"{wheel.name}: two release pages have it")
    packages.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(wheel, packages / wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(member)
    (packages / f"{wheel.name}.metadata").write_bytes(metadata)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    row = {"filename": wheel.name, "hash": f"sha256={digest}"}
    row["core_metadata"] = f"sha256={hashlib.sha256(metadata).hexdigest()}"
    if python := Metadata.from_email(metadata, validate=False).requires_python:
        row["requires_python"] = str(python)
    return row


def _pages(folder: Path, packages: Sequence[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        listing = Path(name, "packages.jsonl")
        listing.write_text("".join(f"{json.dumps(row)}\n" for row in packages))
        command = [sys.executable, "-m", "dumb_pypi.main", "--package-list-json", str(listing)]
        # Relative, so that the index works wherever it is served from.
        command += ["--packages-url", "../../packages", "--output-dir", str(folder)]
        command += ["--title", "flash-attn-deterministic", "--no-generate-timestamp"]
        if status := subprocess.run(command, check=False).returncode:
            raise StepError(f"dumb-pypi did not write the pages (exit status {status}, see above)")


def download_pages(folder: Path, root: Path = ROOT) -> list[Path]:
    """Fetches the files of all release pages, through GitHub's `gh`.

    Args:
        folder: Receives a folder per page.
        root: The source tree, which tells `gh` of which project.

    Returns:
        The folders.

    Raises:
        StepError: There is no `gh`, or it failed.
    """
    if not shutil.which("gh"):
        raise StepError("gh, GitHub's command line tool, is not on PATH; give --pages")

    def gh(*words: str) -> str:
        command = ["gh", "release", *words]
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise StepError(
                f"`{' '.join(command)}` failed (exit status {done.returncode}, see above)"
            )
        return done.stdout

    found = json.loads(gh("list", "--exclude-drafts", "--limit", "1000", "--json", "tagName"))
    for row in found:
        gh("download", row["tagName"], "--dir", str(folder / row["tagName"]))
    return [folder / row["tagName"] for row in found]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes the index.

    Args:
        arguments: Words of the command line; those of the process if None.
        root: The source tree.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s index --", description=__doc__)
    parser.add_argument("--pages", type=Path, help="a folder of them (those of all releases)")
    parser.add_argument("--out", type=Path, default=root / "build" / "index", help="build/index")
    parser.add_argument(
        "--repository", metavar="OWNER/NAME", help="whose attestations are asked for"
    )
    parser.add_argument(
        "--unattested", action="store_true", help="do not ask for attestations: for a rehearsal"
    )
    given = parser.parse_args(arguments)
    if not given.repository and not given.unattested:
        parser.error("--repository: give it, or --unattested")
    exit_on_sigterm()

    def attested(page: Path) -> None:
        if not given.unattested:
            check_attestations(page, given.repository, "", root)

    def work() -> None:
        schema, why = read_schema(root)
        if why:
            raise RefusedError(why)
        with tempfile.TemporaryDirectory(prefix="pages-") as folder:
            pages = sorted(given.pages.iterdir()) if given.pages else None
            if pages is None:
                pages = download_pages(Path(folder), root)
            write_index(pages, given.out.resolve(), POLICY, schema, attested)
        print(f"index: {given.out}")

    return exit_status(work, "The index is as it was.")


if __name__ == "__main__":
    sys.exit(main())
