"""What is published with a wheel: its manifest, the reports that prove it, checksums, and notes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ..compile import manifest
from ..files import sha256_of, write_text
from . import kernels_hub
from .gate import Verdict, gpu_of
from .policy import Policy

NOTES = "notes.md"
CHECKSUMS = "SHA256SUMS"


def write(verdicts: Mapping[str, Verdict], policy: Policy, root: Path, out: Path) -> None:
    """Writes the files of a release page.

    Args:
        verdicts: The gate's, in favour, by local version.
        policy: The release policy.
        root: The source tree, for the changelog.
        out: New folder for the files: `assets/` for the page, `package-index/` for the wheel that
            has no local version, `kernels-hub/` for a repository of the kernel hub, notes.md and
            SHA256SUMS.
    """
    assets = out / "assets"
    assets.mkdir(parents=True)
    for label, verdict in verdicts.items():
        wheel = verdict.wheel.path
        shutil.copyfile(wheel, assets / wheel.name)
        shutil.copyfile(manifest.path_of(wheel), manifest.path_of(assets / wheel.name))
        proofs = sorted({report.path.parent for report in verdict.verified.values()})
        for number, folder in enumerate(proofs, start=1):
            for path in sorted(folder.glob("verification.*")):
                shutil.copyfile(path, assets / report_name(wheel.name, number, path.suffix))
        kernels_hub.write(wheel, out / "kernels-hub")
        if not label:
            (out / "package-index").mkdir()
            shutil.copyfile(wheel, out / "package-index" / wheel.name)
    write_text(out / NOTES, notes(verdicts, policy, root / "CHANGELOG.md"))
    made = sorted(path for path in out.rglob("*") if path.is_file())
    sums = "".join(f"{sha256_of(path)}  {path.relative_to(out).as_posix()}\n" for path in made)
    write_text(out / CHECKSUMS, sums)


def report_name(wheel: str, number: int, suffix: str) -> str:
    """Names a report of a wheel among the files of a release page."""
    return f"{wheel}.verification-{number}{suffix}"


def notes(verdicts: Mapping[str, Verdict], policy: Policy, changelog: Path) -> str:
    """Writes the notes of a release: changes, what was verified, what was not.

    Args:
        verdicts: The gate's, by local version; all of one version.
        policy: The release policy.
        changelog: CHANGELOG.md.

    Returns:
        Markdown.
    """
    version = verdicts[""].wheel.version
    lines = [changes(changelog.read_text(encoding="utf-8"), version), "", "## Verified", ""]
    lines += ["| wheel | CUDA | architectures | GPU | sha256 |", "|---|---|---|---|---|"]
    for label, verdict in verdicts.items():
        gpus = sorted({gpu_of(report) for report in verdict.verified.values()})
        lines.append(
            f"| {version}{'+' + label if label else ', package index'} "
            f"| {verdict.wheel.manifest['cuda_toolkit']} | {', '.join(sorted(verdict.verified))} "
            f"| {', '.join(gpus)} | `{verdict.wheel.sha256}` |"
        )
    unverified = {name: why for each in verdicts.values() for name, why in each.unverified.items()}
    lines += ["", "## Not verified", ""] if unverified else []
    for name, why in sorted(unverified.items()):
        allowed = policy.unverified_architectures[name]
        run = f" Its PTX was run on a newer GPU ({allowed.ptx_report})." if allowed.ptx else ""
        lines.append(f"- **{name}**: {why}{run}")
    tools = verdicts[""].wheel.manifest["tools"]
    made = ", ".join(f"{name} {number}" for name, number in list(tools.items())[:3])
    lines += ["", f"Made with {made} and the packages of locks/: the same give the same bytes."]
    return "\n".join(lines).strip() + "\n"


def changes(changelog: str, version: str) -> str:
    """Takes one version's part of the changelog.

    Args:
        changelog: Its text: `## 1.2.3 (date)` opens a part.
        version: The version.

    Returns:
        The part, without its heading; "" if there is none.
    """
    found = re.search(
        rf"^## {re.escape(version)}(?=\s|$)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    return found[1].strip() if found else ""
