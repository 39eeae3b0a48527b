"""Writes the package index of all releases (PEP 503, 691): `nox -s index`.

Files come from the GitHub releases. A wheel gets into the index if GitHub attests that this
project's workflow built it from the release's tag, and that it passed the gate then. Reports are
not read again: what is demanded of later wheels, or another schema, does not take a release away.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

from ..compile import manifest
from ..errors import RefusedError, exit_status
from ..files import ROOT, replacing_folder, sha256_of, write_json, write_text
from ..wheel.dist_info import PACKAGE
from .attestations import check_built, check_passed, gh, verify
from .gate import find_wheels

NAME = "flash-attn-deterministic"
API = "1.3"  # of PEP 691, the first with attestations
_PAGE = """<!DOCTYPE html>
<html>
<head><meta name="pypi:repository-version" content="{api}"><title>{title}</title></head>
<body>
{links}
</body>
</html>
"""


def write_index(release_dirs: Sequence[Path], out: Path, repository: str | None) -> None:
    """Writes the index: `simple/` for wheels without a local version, `<label>/simple/` for others.

    Releases are folders of their files, named by their tags. `out` is replaced as a whole. Wheels
    must have the attestations of the repository; None: they are not checked.
    """
    with replacing_folder(out) as made:
        files: dict[str, list[dict[str, Any]]] = {}
        for folder in release_dirs:
            source = f"--source-ref=refs/tags/{folder.name}"
            _check_files(folder)
            for wheel in find_wheels(folder):
                if repository is not None:
                    check_built([wheel, manifest.path_of(wheel)], repository, source)
                    check_passed(wheel, repository, folder.name)
                label = parse_wheel_filename(wheel.name)[1].local or ""
                file = _place(wheel, made / label / "packages")
                if repository is not None and (data := _provenance(wheel, repository, source)):
                    target = made / label / "packages" / f"{wheel.name}.provenance"
                    write_json(target, data)
                    # PEP 740 wants a whole address, where wheels have one relative to the page.
                    site = gh("api", f"repos/{repository}/pages", "--jq", ".html_url").strip()
                    file["provenance"] = f"{site.rstrip('/')}/{target.relative_to(made)}"
                files.setdefault(label, []).append(file)
        if not files:
            raise RefusedError("the index would be empty: there is no release")
        for label, listed in files.items():
            _write_pages(made / label / "simple", listed)


def _check_files(folder: Path) -> None:
    """Refuses a release that holds anything but wheels of its version, manifests and reports."""
    wheels = find_wheels(folder)
    if not wheels:
        raise RefusedError(f"{folder.name}: the release holds no wheel")
    version = re.escape(folder.name.removeprefix("v"))
    name = rf"{PACKAGE}-{version}(\+[a-z0-9]+)?-py3-none-\w+\.whl"
    for path in sorted(folder.iterdir()):
        if not re.fullmatch(rf"{name}(\.(manifest|verification-\d+)\.json)?", path.name, re.ASCII):
            raise RefusedError(f"{folder.name}: {path.name!r} does not belong into the release")
    for wheel in wheels:
        manifest.read(wheel)


def _place(wheel: Path, packages: Path) -> dict[str, Any]:
    """Puts a wheel and its metadata (PEP 658) into place; returns what PEP 691 says of it."""
    target = packages / wheel.name
    packages.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(wheel, target)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(member)
    target.with_name(f"{target.name}.metadata").write_bytes(metadata)
    python = str(Metadata.from_email(metadata, validate=False).requires_python or "")
    return {
        "filename": wheel.name,
        # Relative, so that the index works wherever it is served from.
        "url": f"../../packages/{wheel.name}",
        "hashes": {"sha256": sha256_of(wheel)},
        "core-metadata": {"sha256": hashlib.sha256(metadata).hexdigest()},
        "size": wheel.stat().st_size,
        **({"requires-python": python} if python else {}),
    }


def _provenance(wheel: Path, repository: str, source: str) -> dict[str, Any] | None:
    """The attestation of a wheel's build in the form of PEP 740; None if it has not that form."""
    said = json.loads(verify(wheel, repository, source, "--format", "json"))
    bundle = said[0]["attestation"]["bundle"]
    material, envelope = bundle["verificationMaterial"], bundle["dsseEnvelope"]
    subjects = json.loads(base64.b64decode(envelope["payload"]))["subject"]
    if [subject["name"] for subject in subjects] != [wheel.name]:
        return None
    attestation = {
        "version": 1,
        "verification_material": {
            "certificate": material["certificate"]["rawBytes"],
            "transparency_entries": material["tlogEntries"],
        },
        "envelope": {
            "statement": envelope["payload"], "signature": envelope["signatures"][0]["sig"]
        },
    }  # fmt: skip
    publisher = {"kind": "GitHub", "repository": repository, "workflow": "release.yml"}
    bundles = [{"publisher": publisher, "attestations": [attestation]}]
    return {"version": 1, "attestation_bundles": bundles}


def _write_pages(simple: Path, files: Sequence[Mapping[str, Any]]) -> None:
    files = sorted(files, key=lambda file: str(file["filename"]))
    versions = {str(parse_wheel_filename(file["filename"])[1]) for file in files}
    listing = {"meta": {"api-version": API}, "name": NAME, "versions": sorted(versions)}
    write_json(simple / NAME / "index.json", {**listing, "files": files})
    links = "\n".join(map(_link, files))
    write_text(simple / NAME / "index.html", _PAGE.format(api=API, title=NAME, links=links))
    links = f'<a href="{NAME}/">{NAME}</a>'
    write_text(simple / "index.html", _PAGE.format(api=API, title="packages", links=links))


def _link(file: Mapping[str, Any]) -> str:
    attributes = {
        "href": f"{file['url']}#sha256={file['hashes']['sha256']}",
        "data-core-metadata": f"sha256={file['core-metadata']['sha256']}",
        "data-requires-python": file.get("requires-python"),
        "data-provenance": file.get("provenance"),
    }
    words = [f'{key}="{html.escape(text)}"' for key, text in attributes.items() if text]
    return f"<a {' '.join(words)}>{file['filename']}</a><br>"


def download_releases(folder: Path) -> list[Path]:
    """Fetches the files of all GitHub releases; returns a folder for each, named by its tag."""
    listed = gh("release", "list", "--exclude-drafts", "--limit", "1000", "--json", "tagName")
    for tag in (tags := [row["tagName"] for row in json.loads(listed)]):
        gh("release", "download", tag, "--dir", str(folder / tag))
    return [folder / tag for tag in tags]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="nox -s index --", description=__doc__)
    parser.add_argument("--releases", type=Path, help="a folder of them (all GitHub releases)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "index", help="build/index")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--repository", metavar="OWNER/NAME", help="whose attestations to ask for")
    asked.add_argument("--unattested", action="store_true", help="ask for none: for a rehearsal")
    given = parser.parse_args(arguments)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="releases-") as name:
            there = given.releases
            folders = sorted(there.iterdir()) if there else download_releases(Path(name))
            # None with --unattested alone: an empty name is checked like any other, and refused.
            write_index(folders, given.out.resolve(), given.repository)
        print(f"index: {given.out}")

    return exit_status(work, "The index is as it was.")


if __name__ == "__main__":
    sys.exit(main())
