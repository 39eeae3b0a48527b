"""Decides from wheel, reports, policy and tree whether a wheel may be published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RefusedError
from . import ptx as ptx_of
from . import report as reports_of
from . import tree as tree_of
from .candidate import Candidate, read_candidate
from .policy import Policy
from .report import Report, read_report, read_schema

README = "README.md"


@dataclass(frozen=True)
class Verdict:
    """The gate's decision on a wheel.

    Attributes:
        wheel: The wheel.
        reasons: Every reason against publishing it; none: it may be published.
        verified: Architecture to the report that proves it.
        unverified: Architectures of the wheel that were not verified, and why.
    """

    wheel: Candidate
    reasons: tuple[str, ...]
    verified: Mapping[str, Report] = field(repr=False)
    unverified: Mapping[str, str] = field(repr=False)


def find_wheels(dist: Path) -> list[Path]:
    """Lists the wheels that are meant for a release: those in dist/, not those of dist/dev."""
    return sorted(dist.glob("*.whl"))


def find_runs(folder: Path) -> list[Path]:
    """Lists the runs of `verify` below a folder.

    Args:
        folder: The folder.

    Returns:
        Every `verification.json`, and for each run without one the path where it is missing: a
        folder named by a number is that of a run, and a run without a report blocks the release.
    """
    found = set(folder.rglob("verification.json"))
    for run in folder.rglob("*"):
        if run.is_dir() and run.name.isdecimal():  # a link to a folder, too
            found |= {*run.rglob("verification.json")} or {run / "verification.json"}
    return sorted(found)


def judge(
    wheels: Sequence[Path], runs: Sequence[Path], policy: Policy, root: Path, *, strays: bool = True
) -> dict[str, Verdict]:
    """Decides on every wheel of a release.

    Args:
        wheels: The wheels; their manifests lie beside them.
        runs: See `find_runs`; those of other wheels may be among them.
        policy: The release policy.
        root: The source tree.
        strays: Whether reports of other wheels may be among the runs, as on a machine where wheels
            are built and verified again and again.

    Returns:
        Verdict by local version.

    Raises:
        RefusedError: One of them may not be published, or they are not those of the policy; the
            message has every reason.
    """
    verdicts = [decide(wheel, runs, policy, root) for wheel in wheels]
    lines = []
    for verdict in verdicts:
        if verdict.reasons:
            lines.append(f"{verdict.wheel.path.name} (sha256 {verdict.wheel.sha256}):")
            lines += [f"  - {reason}" for reason in verdict.reasons]
    found = sorted(verdict.wheel.local for verdict in verdicts)
    if found != sorted(policy.wheels):
        there = ", ".join(wheel.name for wheel in wheels) or "no wheel"
        wanted = ", ".join(label or "none" for label in policy.wheels)
        lines.append(f"expected one wheel of each local version ({wanted}), found {there}")
    if not strays:
        known = {verdict.wheel.sha256 for verdict in verdicts}
        reports = (read_report(path, {}) for path in runs)
        lines += [
            f"{_where(report)}: is of no wheel of this release (sha256 {report.sha256})"
            for report in reports
            if report.sha256 not in known
        ]
    if lines:
        raise RefusedError("not published, because of\n" + "\n".join(lines))
    return {verdict.wheel.local: verdict for verdict in verdicts}


def decide(wheel: Path, runs: Iterable[Path], policy: Policy, root: Path) -> Verdict:
    """Decides whether a wheel may be published.

    Args:
        wheel: The wheel; its manifest lies beside it.
        runs: See `find_runs`; those of other wheels may be among them.
        policy: The release policy.
        root: The source tree: pin of upstream, JSON Schema of reports, README.

    Returns:
        The verdict, with all reasons against it.
    """
    candidate = read_candidate(wheel, root)
    reasons = [*tree_of.reasons(root, candidate.version), *candidate.faults]
    cuda = candidate.manifest.get("cuda_toolkit")
    if cuda != (wanted := policy.wheels.get(candidate.local, cuda)):
        reasons.append(
            f"manifest: made with CUDA {cuda}, but the release policy wants {wanted} for local "
            f"version {candidate.local or 'none'}"
        )
    schema = read_schema(root)
    reports = [read_report(path, schema) for path in sorted(runs)]
    verified, against = proofs(candidate, reports, policy)
    reasons += against
    allowed = policy.unverified_architectures
    unverified = {
        name: allowed[name].reason if name in allowed else ""
        for name in candidate.architectures
        if name not in verified
    }
    of_these_bytes = [report for report in reports if report.sha256 == candidate.sha256]
    reasons += _named(unverified, policy, of_these_bytes, root)
    for name in unverified:
        if name in allowed and allowed[name].ptx:
            found = ptx_of.faults(root, schema, candidate, allowed[name], policy)
            reasons += [f"{name}: {fault}" for fault in found]
    return Verdict(candidate, tuple(dict.fromkeys(reasons)), verified, unverified)


def proofs(
    wheel: Candidate, reports: Sequence[Report], policy: Policy
) -> tuple[dict[str, Report], list[str]]:
    """Picks the reports that prove a wheel, and those that forbid its release.

    Args:
        wheel: The wheel.
        reports: Reports; those of other wheels may be among them.
        policy: The release policy.

    Returns:
        Architecture to the report that proves it, and every reason against publishing the wheel.
    """
    of_these_bytes = [report for report in reports if report.sha256 == wheel.sha256]
    faults = {report.path: (*reports_of.faults(report, wheel, policy),) for report in reports}
    verified = {
        name: report
        for report in of_these_bytes
        if not faults[report.path]
        for name in report.names("ran")
        if name in wheel.architectures
    }
    reasons = []
    missing = [name for name in policy.required_architectures if name not in verified]
    for name in missing:
        if wheel.manifest and name not in wheel.architectures:
            reasons.append(f"{name}: the wheel holds no machine code for it")
        reasons.append(f"{name}: no complete, passing report for sha256 {wheel.sha256}")
    for report in reports:
        found: Iterable[str] = ()
        # A report that was changed or cannot be read may have been of these bytes. A failure counts
        # even if another report passed. A quick run that passed is no proof, but does not block.
        if report.sha256 == wheel.sha256 or report.faults:
            found = (*reports_of.run_faults(report), *reports_of.state_faults(report.content))
        if missing and report in (of_these_bytes or reports):
            found = (*found, *faults[report.path])
        reasons += [f"{_where(report)}: {fault}" for fault in found]
    return verified, reasons


def _named(
    unverified: Mapping[str, str], policy: Policy, reports: Iterable[Report], root: Path
) -> Iterator[str]:
    """What was not verified must be allowed by the policy, and named in README and reports."""
    readme = (root / README).read_text(encoding="utf-8")
    for name, reason in unverified.items():
        if name in policy.required_architectures:
            continue  # `proofs` has named it
        if not reason:
            yield f"{name}: unverified, and the release policy does not allow for that"
            continue
        if name not in readme:
            yield f"{name}: unverified, but {README} does not name it"
        for report in reports:
            if name not in report.names("unverified"):
                yield f"{name}: unverified, but {_where(report)} does not say so"


def _where(report: Report) -> str:
    return f"{report.path.parent.name}/{report.path.name}"
