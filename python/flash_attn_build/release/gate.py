"""Decides from wheel, reports, policy and tree whether a wheel may be published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import ptx, tree
from .candidate import Candidate, read_candidate
from .policy import Policy
from .report import Report, failures, proof_problems, read_report, read_schema, run_problems

README = "README.md"


@dataclass(frozen=True)
class Verdict:
    """The gate's decision on a wheel.

    Attributes:
        wheel: The wheel.
        problems: Everything that stands against publishing it; none: it may be published.
        failed: What failed in a run of these bytes: they may never be published.
        verified: Architecture to the report that proves it.
        unverified: Architectures of the wheel that were not verified, and why.
    """

    wheel: Candidate
    problems: tuple[str, ...]
    failed: tuple[str, ...]
    verified: Mapping[str, Report] = field(repr=False)
    unverified: Mapping[str, str] = field(repr=False)


def find_wheels(dist: Path) -> list[Path]:
    """Lists the wheels that are meant for a release: those in dist/, not those of dist/dev."""
    return sorted(dist.glob("*.whl"))


def find_runs(folder: Path) -> list[Path]:
    """Lists the reports below a folder, and for each run without one where it is missing.

    A folder named by a number is that of a run. A run without a report blocks the release.
    """
    found = set(folder.rglob("verification.json"))
    for run in folder.rglob("*"):
        if run.is_dir() and run.name.isdecimal():  # a link to a folder, too
            found |= {*run.rglob("verification.json")} or {run / "verification.json"}
    return sorted(found)


def gpu_test_modules(root: Path, policy: Policy) -> list[str]:
    """Names the modules of tests/gpu of each of which a test must have passed."""
    paths = sorted((root / "tests" / "gpu").rglob("test_*.py"))
    names = [path.relative_to(root).with_suffix("").parts for path in paths]
    return [".".join(name) for name in names if not {*name} & {*policy.other_gpu_tests}]


def judge(
    wheels: Sequence[Path],
    runs: Sequence[Path],
    policy: Policy,
    root: Path,
    *,
    tag: str = "",
    allow_other_reports: bool = True,
) -> tuple[dict[str, Verdict], list[str]]:
    """Decides on every wheel of a release; their manifests lie beside them.

    Args:
        wheels: The wheels.
        runs: See `find_runs`.
        policy: The release policy.
        root: The source tree.
        tag: The tag that started the workflow; "": the gate is run by hand.
        allow_other_reports: Whether reports of other wheels may be among the runs, as on a machine
            where wheels are built and verified again and again.

    Returns:
        Verdict by local version, and everything that stands against the release.
    """
    verdicts = [decide(wheel, runs, policy, root, tag) for wheel in wheels]
    lines = []
    for verdict in verdicts:
        if verdict.problems:
            lines.append(f"{verdict.wheel.path.name} (sha256 {verdict.wheel.sha256}):")
            lines += [f"  - {problem}" for problem in verdict.problems]
    if sorted(verdict.wheel.local for verdict in verdicts) != sorted(policy.wheels):
        there = ", ".join(wheel.name for wheel in wheels) or "no wheel"
        wanted = ", ".join(label or "none" for label in policy.wheels)
        lines.append(f"expected one wheel of each local version ({wanted}), found {there}")
    if not allow_other_reports:
        known = {verdict.wheel.sha256 for verdict in verdicts}
        reports = (read_report(path, {}) for path in runs)
        lines += [
            f"{report.where}: is of no wheel of this release (sha256 {report.sha256})"
            for report in reports
            if report.sha256 not in known
        ]
    return {verdict.wheel.local: verdict for verdict in verdicts}, lines


def decide(wheel: Path, runs: Iterable[Path], policy: Policy, root: Path, tag: str = "") -> Verdict:
    """Decides whether a wheel may be published: see `judge`."""
    candidate = read_candidate(wheel, root, policy)
    problems = [*tree.problems(root, candidate.version, tag), *candidate.problems]
    cuda = candidate.manifest.get("cuda_toolkit")
    if cuda != (wanted := policy.wheels.get(candidate.local, cuda)):
        problems.append(
            f"manifest: made with CUDA {cuda}, but the release policy wants {wanted} for local "
            f"version {candidate.local or 'none'}"
        )
    schema = read_schema(root)
    reports = [read_report(path, schema) for path in sorted(runs)]
    verified, found = proofs(candidate, reports, policy, gpu_test_modules(root, policy))
    problems += found
    allowed = policy.unverified_architectures
    unverified = {
        name: allowed[name].reason if name in allowed else ""
        for name in candidate.architectures
        if name not in verified
    }
    of_these_bytes = [report for report in reports if report.sha256 == candidate.sha256]
    problems += _named(unverified, policy, of_these_bytes, root)
    for name in unverified:
        if name in allowed and allowed[name].ptx:
            against = ptx.problems(root, schema, candidate, allowed[name], policy)
            problems += [f"{name}: {problem}" for problem in against]
    failed = [
        f"{report.where}: {failure}"
        for report in reports
        for failure in failures(report, candidate.sha256)
    ]
    problems += failed
    return Verdict(candidate, tuple(dict.fromkeys(problems)), tuple(failed), verified, unverified)


def proofs(
    wheel: Candidate, reports: Sequence[Report], policy: Policy, modules: Sequence[str]
) -> tuple[dict[str, Report], list[str]]:
    """Picks for each architecture a report that proves it, and says what stands against a wheel."""
    of_these_bytes = [report for report in reports if report.sha256 == wheel.sha256]
    found = {report.path: [*proof_problems(report, wheel, policy, modules)] for report in reports}
    verified = {
        name: report
        for report in of_these_bytes
        if not found[report.path]
        for name in report.names("ran")
        if name in wheel.architectures
    }
    problems = []
    missing = [name for name in policy.required_architectures if name not in verified]
    for name in missing:
        if wheel.manifest and name not in wheel.architectures:
            problems.append(f"{name}: the wheel holds no machine code for it")
        problems.append(f"{name}: no complete, passing report for sha256 {wheel.sha256}")
    for report in reports:
        against: list[str] = []
        # A report that was changed or cannot be read may have been of these bytes. A quick run
        # that passed is no proof, but does not block.
        if report.sha256 == wheel.sha256 or report.problems:
            against += run_problems(report)
        if missing and report in (of_these_bytes or reports):
            against += found[report.path]
        problems += [f"{report.where}: {problem}" for problem in against]
    return verified, problems


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
                yield f"{name}: unverified, but {report.where} does not say so"
