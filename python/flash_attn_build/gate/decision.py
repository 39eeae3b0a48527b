"""Puts wheel, reports, policy and tree together: may this wheel be published?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import ptx as ptx_of
from . import report as reports_of
from . import tree as tree_of
from .candidate import Candidate, read_candidate
from .policy import Policy
from .report import Report, read_report
from .tree import Tree

SCHEMA = "docs/verification.schema.json"
README = "README.md"


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a wheel.

    Attributes:
        wheel: The wheel.
        reasons: Every reason against publishing it; none: it may be published.
        verified: Architecture to the report that proves it.
        unverified: Architectures of the wheel that nobody could verify, and why.
    """

    wheel: Candidate
    reasons: tuple[str, ...]
    verified: Mapping[str, Report] = field(repr=False)
    unverified: Mapping[str, str] = field(repr=False)


def decide(wheel: Path, reports: Iterable[Path], policy: Policy, tree: Tree, root: Path) -> Verdict:
    """Decides whether a wheel may be published.

    Args:
        wheel: The wheel; its manifest lies beside it.
        reports: Reports; those of other wheels may be among them.
        policy: The release policy.
        tree: State of the source tree.
        root: The source tree: pin of upstream, JSON Schema of reports, README.

    Returns:
        The verdict, with all reasons against it.
    """
    candidate = read_candidate(wheel, root)
    reasons = [*tree_of.reasons(tree, candidate.version), *candidate.faults]
    schema, why = read_schema(root)
    reasons += [why] if why else []
    read = [read_report(path, schema) for path in sorted(reports)]
    of_these_bytes = [report for report in read if report.sha256 == candidate.sha256]
    faults = {report.path: tuple(reports_of.faults(report, candidate, policy)) for report in read}
    verified = {
        name: report
        for report in of_these_bytes
        if not faults[report.path]
        for name in report.ran
        if name in candidate.architectures
    }
    allowed = policy.unverified_architectures
    unverified = {
        name: allowed[name].reason if name in allowed else ""
        for name in candidate.architectures
        if name not in verified
    }
    told: list[Report] = []
    missing = [name for name in policy.required_architectures if name not in verified]
    for name in missing:
        if candidate.manifest and name not in candidate.architectures:
            reasons.append(f"{name}: the wheel holds no machine code for it")
        reasons.append(f"{name}: no complete, passing report for sha256 {candidate.sha256}")
    if missing:
        told = of_these_bytes or read
    # A failure is not undone by another report that passed.
    told += [r for r in of_these_bytes if r not in told and reports_of.failed(r)]
    reasons += [f"{_where(r)}: {fault}" for r in told for fault in faults[r.path]]
    reasons += _named(unverified, policy, of_these_bytes, root)
    for name in unverified:
        if name in allowed and allowed[name].ptx:
            found = ptx_of.faults(root, schema, candidate, allowed[name], policy)
            reasons += [f"{name}: {fault}" for fault in found]
    return Verdict(candidate, tuple(dict.fromkeys(reasons)), verified, unverified)


def _named(
    unverified: Mapping[str, str], policy: Policy, reports: Iterable[Report], root: Path
) -> list[str]:
    """What nobody verified must be allowed to be so, and be said wherever someone reads of it."""
    found = []
    readme = (root / README).read_text(encoding="utf-8")
    for name, reason in unverified.items():
        if name in policy.required_architectures:
            continue  # told already
        if not reason:
            found.append(f"{name}: unverified, and the release policy does not allow for that")
            continue
        if name not in readme:
            found.append(f"{name}: unverified, but {README} does not name it")
        for report in reports:
            if name not in report.unverified:
                found.append(f"{name}: unverified, but {_where(report)} does not say so")
    return found


def _where(report: Report) -> str:
    return f"{report.path.parent.name}/{report.path.name}"


def read_schema(root: Path) -> tuple[dict[str, Any], str]:
    """Reads the JSON Schema of reports.

    Args:
        root: The source tree.

    Returns:
        The schema, and "" or why there is none.
    """
    try:
        found = json.loads((root / SCHEMA).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"schema: {SCHEMA} is unreadable, so no report can be held to it ({error})"
    return found, ""
