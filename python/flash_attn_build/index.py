"""Writes a static package index (PEP 503) of all releases, one folder per CUDA toolkit.

It takes the bundles of the release pages, whose wheels have passed the gate, and holds the reports
in each to its wheel anew. dumb-pypi writes the pages.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

from . import bundles, files
from .bundles import Bundle
from .errors import BuildError, RefusedError, UploadError
from .gate.decision import read_schema
from .gate.policy import Policy, load_policy
from .publish import ROOT


def write_index(
    paths: Sequence[Path], out: Path, policy: Policy, schema: Mapping[str, Any]
) -> None:
    """Writes the index.

    Args:
        paths: Bundles, as `bundles.pack` makes them.
        out: Folder for the index; it is replaced as a whole.
        policy: The release policy.
        schema: JSON Schema of reports.

    Raises:
        RefusedError: A bundle is not one of ours, or lacks its proof.
        UploadError: The pages could not be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name, "index")
        rows: dict[str, list[dict[str, str]]] = {}
        for path in sorted(paths):
            bundle = bundles.unpack(path, policy, schema)
            row = _place(bundle, made / bundle.label / "packages", path.name)
            rows.setdefault(bundle.label, []).append(row)
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


def _place(bundle: Bundle, packages: Path, origin: str) -> dict[str, str]:
    """Puts a bundle's wheel and its metadata (PEP 658) into place; returns its row."""
    if (packages / bundle.name).exists():
        raise RefusedError(f"{origin}: another bundle of {bundle.label} has {bundle.name} as well")
    packages.mkdir(parents=True, exist_ok=True)
    (packages / bundle.name).write_bytes(bundle.data)
    (packages / f"{bundle.name}.metadata").write_bytes(bundle.metadata)
    row = {"filename": bundle.name, "hash": f"sha256={bundle.sha256}"}
    row["core_metadata"] = f"sha256={hashlib.sha256(bundle.metadata).hexdigest()}"
    if python := Metadata.from_email(bundle.metadata, validate=False).requires_python:
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
    try:
        rows = _gh(root, "list", "--exclude-drafts", "--limit", "1000", "--json", "tagName")
        for tag in [row["tagName"] for row in rows]:
            assets = _gh(root, "view", tag, "--json", "assets")["assets"]
            names = [name for name in (each["name"] for each in assets) if bundles.label_of(name)]
            if not names:  # a page that is older than bundles, or of something else
                continue
            words = [word for name in names for word in ("--pattern", name)]
            fetch = ["gh", "release", "download", tag, "--dir", str(folder), *words]
            if subprocess.run(fetch, cwd=root, check=False).returncode:
                raise UploadError(f"gh did not fetch the bundles of {tag}, see above")
    except (ValueError, LookupError, TypeError) as error:
        raise UploadError(f"gh answered what is not understood ({error!r})") from error


def _gh(root: Path, *words: str) -> Any:
    """What `gh release ...` answers, parsed."""
    command = ["gh", "release", *words]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UploadError(
            f"`{' '.join(command)}` failed (exit status {done.returncode}, see above)"
        )
    return json.loads(done.stdout)


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
    try:
        schema, why = read_schema(root)
        if why:
            raise RefusedError(why)
        with tempfile.TemporaryDirectory(prefix="bundles-") as folder:
            found = given.bundles or Path(folder)
            if given.bundles is None:
                download_bundles(found, root)
            write_index([*found.glob("*.zip")], given.out.resolve(), load_policy(), schema)
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
