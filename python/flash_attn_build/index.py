"""Writes a static package index (PEP 503) of all releases, one folder per CUDA toolkit.

It takes the bundles of the release pages, whose wheels have passed the gate, and checks that each
still holds a wheel and a report of the same bytes. dumb-pypi writes the pages.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.metadata import Metadata

from . import files
from .errors import BuildError, RefusedError, UploadError
from .gate.policy import load_policy
from .gate.report import digest
from .publish import ROOT


def write_index(bundles: Sequence[Path], out: Path, labels: Sequence[str]) -> None:
    """Writes the index.

    Args:
        bundles: Bundles, as `release_page.bundle` makes them.
        out: Folder for the index; it is replaced as a whole.
        labels: Of the toolkits, such as "cu130"; bundles end in one.

    Raises:
        RefusedError: A bundle is not one of ours, or its report is not of its wheel.
        UploadError: The pages could not be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name, "index")
        rows: dict[str, list[dict[str, str]]] = {}
        for path in sorted(bundles):
            label = path.stem.rpartition("-")[2]
            if label not in labels:
                raise RefusedError(f"{path.name}: expected a name ending in {', '.join(labels)}")
            rows.setdefault(label, []).append(_unpack(path, made / label / "packages"))
        if not rows:
            raise RefusedError("the index would be empty: there is no bundle of any release")
        for label, packages in rows.items():
            _pages(made / label, packages, label)
        links = "".join(
            f'<li><a href="{label}/simple/">{html.escape(label)}</a></li>' for label in sorted(rows)
        )
        title = "flash-attn-deterministic: package indexes by CUDA toolkit"
        files.write_text(
            made / "index.html",
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
            f"<h1>{title}</h1>\n<ul>{links}</ul>\n</html>\n",
        )
        old = Path(name, "old")
        if out.exists():
            os.rename(out, old)
        try:
            os.rename(made, out)
        except OSError:
            if old.exists():
                os.rename(old, out)
            raise


def _unpack(path: Path, packages: Path) -> dict[str, str]:
    """Puts a bundle's wheel and its metadata (PEP 658) into place; returns its row."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".whl"))
            data = archive.read(name)
            sha256 = hashlib.sha256(data).hexdigest()
            reports = [
                json.loads(archive.read(n))
                for n in archive.namelist()
                if n.endswith("/verification.json")
            ]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RefusedError(f"{path.name}: not a bundle of a release ({error})") from error
    proofs = [
        report for report in reports
        if report.get("status") == "passed"
        and report.get("wheel", {}).get("sha256") == sha256
        and report.get("digest") == digest(report)
    ]  # fmt: skip
    if not proofs or "/" in name:
        raise RefusedError(f"{path.name}: holds no passing report of its wheel (sha256 {sha256})")
    packages.mkdir(parents=True, exist_ok=True)
    (packages / name).write_bytes(data)
    with zipfile.ZipFile(packages / name) as wheel:
        (member,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = wheel.read(member)
    (packages / f"{name}.metadata").write_bytes(metadata)
    row = {"filename": name, "hash": f"sha256={sha256}"}
    row["core_metadata"] = f"sha256={hashlib.sha256(metadata).hexdigest()}"
    if python := Metadata.from_email(metadata, validate=False).requires_python:
        row["requires_python"] = str(python)
    return row


def _pages(folder: Path, packages: Sequence[dict[str, str]], label: str) -> None:
    listing = folder.parent / f"{label}.jsonl"
    listing.write_text("".join(f"{json.dumps(row)}\n" for row in packages))
    command = [sys.executable, "-m", "dumb_pypi.main", "--package-list-json", str(listing)]
    # Relative, so that the index works wherever it is served from.
    command += ["--packages-url", "../../packages", "--output-dir", str(folder)]
    command += ["--title", f"flash-attn-deterministic, {label}", "--no-generate-timestamp"]
    status = subprocess.run(command, check=False).returncode
    listing.unlink()
    if status:
        raise UploadError(f"dumb-pypi did not write the pages (exit status {status}, see above)")


def download_bundles(folder: Path, root: Path = ROOT) -> None:
    """Fetches the bundles of all release pages, through GitHub's `gh`.

    Args:
        folder: For the bundles.
        root: The source tree, which tells `gh` of which project.

    Raises:
        UploadError: There is no `gh`, or it failed.
    """
    if not shutil.which("gh"):
        raise UploadError("gh, GitHub's command line tool, is not installed here; give --bundles")
    listing = ["gh", "release", "list", "--exclude-drafts", "--limit", "1000", "--json", "tagName"]
    done = subprocess.run(listing, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UploadError("gh did not list the releases, see above")
    for row in json.loads(done.stdout):
        fetch = ["gh", "release", "download", row["tagName"], "--dir", str(folder)]
        if subprocess.run([*fetch, "--pattern", "*-cu*.zip"], cwd=root, check=False).returncode:
            raise UploadError(f"gh did not fetch the bundles of {row['tagName']}, see above")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes the index.

    Args:
        arguments: Words of the command line; those of the process if None.
        root: The source tree.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s index --", description=__doc__)
    parser.add_argument("--bundles", type=Path, help="a folder of them (those of all releases)")
    parser.add_argument("--out", type=Path, default=root / "build" / "index", help="build/index")
    given = parser.parse_args(arguments)
    labels = [kit.label for kit in load_policy().toolkits.values()]
    try:
        with tempfile.TemporaryDirectory(prefix="bundles-") as folder:
            bundles = given.bundles or Path(folder)
            if given.bundles is None:
                download_bundles(bundles, root)
            write_index(sorted(bundles.glob("*.zip")), given.out.resolve(), labels)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}. The index is as it was.", file=sys.stderr)
        return UploadError.exit_code
    print(f"index: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
