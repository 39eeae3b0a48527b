"""Writes a static package index (PEP 503) of all releases: `nox -s index`.

Wheels, manifests and reports come from the release pages and are all checked again. Each wheel must
have the attestation of this project's build, pass the checks of wheels, and have reports that prove
it. The newest is judged by the whole policy, earlier ones without demands that were added later.
dumb-pypi writes the pages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.version import Version

from ..errors import BuildError, RefusedError, exit_status
from ..files import ROOT
from .__main__ import check_attestations, gh
from .candidate import Candidate, read_candidate
from .gate import find_wheels, proofs
from .policy import POLICY, Policy
from .report import read_report, read_schema


def write_index(pages: Sequence[Path], out: Path, repository: str | None) -> None:
    """Writes the index: `simple/` for wheels without a local version, `<label>/simple/` for others.

    Args:
        pages: A folder per release page, with its files.
        out: Folder for the index; it is replaced as a whole.
        repository: Whose attestations the wheels must have; None: they are not checked.

    Raises:
        RefusedError: A wheel is not this project's, or no report proves it.
        BuildError: The pages could not be written.
    """
    schema = read_schema(ROOT)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name, "index")
        rows: dict[str, list[dict[str, str]]] = {}
        for page in pages:
            if not find_wheels(page):
                raise RefusedError(f"{page.name}: its release page holds no wheel")
            if repository is not None:
                check_attestations(page, repository, f"--source-ref=refs/tags/{page.name}")
        found = [read_candidate(wheel) for page in pages for wheel in find_wheels(page)]
        newest = max((Version(wheel.version or "0") for wheel in found), default=None)
        for wheel in found:
            last = Version(wheel.version or "0") == newest
            _judge(wheel, POLICY if last else _earlier(POLICY, wheel), schema)
            row = _place(wheel, made / wheel.local / "packages")
            rows.setdefault(wheel.local, []).append(row)
        if not rows:
            raise RefusedError("the index would be empty: there is no release")
        for label, packages in rows.items():
            _pages(made / label, packages)
        if out.exists():
            out.rename(Path(name, "old"))
        made.rename(out)


def _earlier(policy: Policy, wheel: Candidate) -> Policy:
    """The policy for an earlier release, without demands that were added later."""
    known = policy.required_architectures.items()
    held = {name: gpus for name, gpus in known if name in wheel.architectures}
    return replace(policy, required_architectures=held, required_sections=(), required_checks=())


def _judge(wheel: Candidate, policy: Policy, schema: Mapping[str, Any]) -> None:
    """Refuses a wheel with a fault, or without a report that proves it."""
    places = sorted(wheel.path.parent.glob(f"{wheel.path.name}.verification-*.json"))
    verified, against = proofs(wheel, [read_report(path, schema) for path in places], policy)
    reasons = [*wheel.faults, *against]
    if not reasons and not verified:
        reasons.append("no report proves any of its machine code")
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise RefusedError(f"{wheel.path.name} (sha256 {wheel.sha256}) lacks its proof:{lines}")


def _place(wheel: Candidate, packages: Path) -> dict[str, str]:
    """Puts a wheel and its metadata (PEP 658) into place; returns its row."""
    target = packages / wheel.path.name
    if target.exists():
        raise RefusedError(f"{target.name}: two release pages have it")
    packages.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(wheel.path, target)
    with zipfile.ZipFile(wheel.path) as archive:
        (member,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(member)
    target.with_name(f"{target.name}.metadata").write_bytes(metadata)
    row = {"filename": target.name, "hash": f"sha256={wheel.sha256}"}
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
            raise BuildError(f"dumb-pypi did not write the pages (exit status {status}, see above)")


def download_pages(folder: Path) -> list[Path]:
    """Fetches the files of all release pages, through GitHub's `gh`.

    Args:
        folder: Receives a folder per page.

    Returns:
        The folders.

    Raises:
        BuildError: There is no `gh`, or it failed.
    """
    listed = gh(ROOT, "release", "list", "--exclude-drafts", "--limit", "1000", "--json", "tagName")
    tags = [row["tagName"] for row in json.loads(listed)]
    for tag in tags:
        gh(ROOT, "release", "download", tag, "--dir", str(folder / tag))
    return [folder / tag for tag in tags]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the index.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s index --", description=__doc__)
    parser.add_argument("--pages", type=Path, help="a folder of them (those of all releases)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "index", help="build/index")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--repository", metavar="OWNER/NAME", help="whose attestations to ask for")
    asked.add_argument("--unattested", action="store_true", help="ask for none: for a rehearsal")
    given = parser.parse_args(arguments)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="pages-") as folder:
            pages = sorted(given.pages.iterdir()) if given.pages else download_pages(Path(folder))
            # None with --unattested alone: an empty name is checked like any other, and refused.
            write_index(pages, given.out.resolve(), given.repository)
        print(f"index: {given.out}")

    return exit_status(work, "The index is as it was.")


if __name__ == "__main__":
    sys.exit(main())
