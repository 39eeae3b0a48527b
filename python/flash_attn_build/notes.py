"""The text of a release: what changed, what was verified, and what nobody could verify."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .gate.decision import Verdict
from .gate.policy import Policy


def release_notes(verdicts: Sequence[Verdict], policy: Policy, changelog: Path) -> str:
    """Writes the notes of a release.

    Args:
        verdicts: The gate's, one per wheel; all of one version.
        policy: The release policy.
        changelog: CHANGELOG.md.

    Returns:
        Markdown.
    """
    version = verdicts[0].wheel.version
    lines = [changes(changelog.read_text(encoding="utf-8"), version), "", "## Verified", ""]
    lines += ["| CUDA | architectures | GPU | sha256 |", "|---|---|---|---|"]
    for verdict in verdicts:
        gpus = {_gpu(report.content.get("environment")) for report in verdict.verified.values()}
        lines.append(
            f"| {verdict.wheel.manifest.get('cuda_toolkit', '?')} "
            f"| {', '.join(sorted(verdict.verified)) or 'none'} "
            f"| {', '.join(sorted(gpus)) or 'none'} | `{verdict.wheel.sha256}` |"
        )
    unverified = {name: why for verdict in verdicts for name, why in verdict.unverified.items()}
    if unverified:
        lines += ["", "## Not verified", ""]
        for name, why in sorted(unverified.items()):
            allowed = policy.unverified_architectures.get(name)
            instead = (
                f" Its PTX was run on a newer GPU ({allowed.ptx_report})."
                if (allowed and allowed.ptx)
                else ""
            )
            lines.append(f"- **{name}**: {why}{instead}")
    first = policy.toolkits[policy.package_index]
    lines += ["", f"The package index has the wheel of CUDA {first.series}."]
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


def _gpu(environment: object) -> str:
    return str(environment.get("gpu", "?")) if isinstance(environment, dict) else "?"
