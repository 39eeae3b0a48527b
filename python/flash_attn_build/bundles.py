"""The files of a release page that hold a toolkit's wheel together with its proof.

All toolkits' wheels of a version have one name, so a page has room for one of them as it is; the
others are in bundles, `<name>-<version>-<toolkit>.zip`.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import manifest, wheelcheck
from .errors import RefusedError
from .gate import report as reports_of
from .gate.candidate import Candidate
from .gate.decision import Verdict
from .gate.policy import Policy, Toolkit
from .gate.report import Report, parse_report

_DATE = (1980, 1, 1, 0, 0, 0)  # the same wheel and reports give the same bundle
# Any toolkit: one that is no longer released for has its bundles of earlier versions.
_NAME = re.compile(rf"{wheelcheck.PACKAGE}-[\w.+!]+-(?P<label>cu\d+)\.zip")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was opened.

    Attributes:
        label: Of the toolkit, such as "cu130".
        name: File name of the wheel.
        data: The wheel.
        sha256: Of its bytes.
        metadata: The wheel's METADATA.
    """

    label: str
    name: str
    data: bytes = field(repr=False)
    sha256: str
    metadata: bytes = field(repr=False)


def label_of(name: str) -> str:
    """Tells which toolkit a bundle is of.

    Args:
        name: File name.

    Returns:
        The toolkit's label; "" if no bundle has such a name.
    """
    found = _NAME.fullmatch(name)
    return found["label"] if found else ""


def pack(verdict: Verdict, kit: Toolkit, folder: Path) -> Path:
    """Packs a wheel with its manifest and the reports that prove it.

    Args:
        verdict: The gate's.
        kit: The toolkit.
        folder: For the bundle.

    Returns:
        The bundle.
    """
    wheel = verdict.wheel.path
    proofs = {report.path for report in verdict.verified.values()}
    beside = wheel.with_name(manifest.file_name(wheel.name))
    members = {path.name: path for path in (wheel, beside)}
    for number, proof in enumerate(sorted(proofs)):
        for path in sorted(proof.parent.glob("verification.*")):
            members[f"verification-{number}/{path.name}"] = path
    made = folder / f"{'-'.join(wheel.name.split('-')[:2])}-{kit.label}.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return made


def unpack(path: Path, policy: Policy, schema: Mapping[str, Any]) -> Bundle:
    """Opens a bundle, and holds its reports to its wheel as the gate does.

    Args:
        path: The bundle.
        policy: The release policy.
        schema: JSON Schema of reports.

    Returns:
        Its content.

    Raises:
        RefusedError: It is not one of ours, or lacks its proof.
    """
    label = label_of(path.name)
    if not label:
        form = f"{wheelcheck.PACKAGE}-VERSION-cu<digits>.zip"
        raise RefusedError(f"{path.name}: expected a name of the form {form}")
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".whl"))
            if "/" in name:
                raise ValueError(f"expected the wheel at the top, found {name}")
            data = archive.read(name)
            text = json.loads(archive.read(manifest.file_name(name)))
            reports = [
                parse_report(Path(n), archive.read(n), schema)
                for n in sorted(archive.namelist())
                if n.endswith("verification.json")
            ]
            with archive.open(name) as inner, zipfile.ZipFile(inner) as wheel:
                (member,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
                metadata = wheel.read(member)
    # Whatever readers of zip and JSON throw at a damaged file.
    except Exception as error:
        raise RefusedError(f"{path.name}: not a bundle of a release ({error!r})") from error
    sha256 = hashlib.sha256(data).hexdigest()
    text = text if isinstance(text, dict) else {}
    found = [*_faults(Candidate(Path(name), "", sha256, text), reports, policy)]
    if found:
        lines = "".join(f"\n  - {fault}" for fault in found)
        raise RefusedError(f"{path.name}: its wheel (sha256 {sha256}) lacks its proof:{lines}")
    return Bundle(label, name, data, sha256, metadata)


def _faults(wheel: Candidate, reports: list[Report], policy: Policy) -> Iterator[str]:
    stated = reports_of.at(wheel.manifest, "wheel", "sha256")
    if stated != wheel.sha256:
        yield f"the manifest is of another wheel (sha256 {stated})"
    for report in reports:
        for fault in reports_of.faults(report, wheel, policy):
            yield f"{report.path}: {fault}"
    ran = {name for report in reports for name in report.ran}
    for name in policy.required_architectures:
        if name not in ran:
            yield f"{name}: no report"
