"""Decides from wheel, reports, policy and tree whether a wheel may be published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compile import sources
from ..errors import printable
from . import tree
from .candidate import Candidate, read_candidate
from .policy import Policy, Unverified
from .report import (
    Report,
    build_problems,
    failures,
    proof_problems,
    read_report,
    run_problems,
    state_problems,
)

README, REPORT = "README.md", "verification.json"


@dataclass(frozen=True)
class Verdict:
    """The gate's decision on a wheel: it may be published if there are no problems."""

    wheel: Candidate
    problems: tuple[str, ...]
    failed: tuple[str, ...]  # in a run of these bytes, which may never be published
    verified: Mapping[str, Report] = field(repr=False)  # by architecture
    unverified: Mapping[str, str] = field(repr=False)  # architecture and reason


def find_wheels(dist: Path) -> list[Path]:
    """Lists the wheels that are meant for a release: those in dist/, not those of dist/dev."""
    return sorted(dist.glob("*.whl"))


def find_runs(folder: Path) -> list[Path]:
    """Lists the reports below a folder, and what may hide one: it cannot be read, so it blocks.

    That is a link, a pipe, and a run without a report. What a folder of runs holds is a run, and
    so is a folder named by a number.
    """
    found = set[Path]()
    for path in folder.rglob("*"):
        if path.name == REPORT or path.is_symlink() or not (path.is_file() or path.is_dir()):
            found.add(path)
        elif path.parent.name.startswith("verification") or path.name.isdecimal():
            found |= {*path.rglob(REPORT)} or {path / REPORT}
    return sorted(found)


def gpu_test_modules(root: Path, policy: Policy) -> list[str]:
    """Names the modules, run by `nox -s verify`, of each of which a test must have passed."""
    paths = sorted((root / "tests" / "gpu").rglob("test_*.py"))
    paths.append(root / "tests" / "unit" / "interface" / "test_mistakes.py")
    names = [path.relative_to(root).with_suffix("").parts for path in paths]
    return [".".join(name) for name in names if not {*name} & {*policy.other_gpu_tests}]


def judge(
    wheels: Sequence[Path],
    runs: Sequence[Path],
    policy: Policy,
    root: Path,
    tag: str | None = None,
) -> tuple[dict[str, Verdict], list[str]]:
    """Decides on every wheel of a release; their manifests lie beside them.

    `tag` is the one that started the workflow, None by hand: there wheels are built and verified
    again and again, and reports of other ones may be among the runs.

    Returns:
        Verdict by kind of wheel, and everything that stands against the release.
    """
    reports = [read_report(path, root) for path in runs]
    verdicts = [decide(wheel, reports, policy, root, tag) for wheel in wheels]
    lines = []
    for verdict in verdicts:
        if verdict.problems:
            lines.append(f"{verdict.wheel.path.name!r} (sha256 {verdict.wheel.sha256}):")
            lines += [f"  - {problem}" for problem in verdict.problems]
    if sorted(verdict.wheel.kind for verdict in verdicts) != sorted(policy.wheels):
        there = ", ".join(repr(wheel.name) for wheel in wheels) or "no wheel"
        lines.append(f"expected one wheel each of {', '.join(policy.wheels)}, found {there}")
    if tag is not None:
        known = {verdict.wheel.sha256 for verdict in verdicts}
        others = [report for report in reports if report.sha256 not in known]
        lines += [f"  - {each.where}: is of no wheel of this release" for each in others]
    return {verdict.wheel.kind: verdict for verdict in verdicts}, [*map(printable, lines)]


def decide(
    wheel: Path, reports: Sequence[Report], policy: Policy, root: Path, tag: str | None = None
) -> Verdict:
    """Decides whether a wheel may be published: see `judge`."""
    candidate = read_candidate(wheel, root, policy)
    problems = [*tree.problems(root, candidate.version, tag), *candidate.problems]
    cuda = candidate.manifest.get("cuda_toolkit")
    if cuda != (wanted := policy.wheels.get(candidate.kind, cuda)):
        problems.append(
            f"manifest: made with CUDA {cuda}, but the policy wants {wanted} for {candidate.kind}"
        )
    modules = gpu_test_modules(root, policy)
    against = {each.path: [*proof_problems(each, candidate, policy, modules)] for each in reports}
    of_these_bytes = [report for report in reports if report.sha256 == candidate.sha256]
    held = candidate.architectures
    verified = {
        name: report
        for report in of_these_bytes
        if not against[report.path]
        for name in report.names("ran")
        if name in held
    }
    missing = [name for name in policy.required_architectures if name not in verified]
    for name in missing:
        if candidate.manifest and name not in held:
            problems.append(f"{name}: the wheel holds no machine code for it")
        problems.append(f"{name}: no complete, passing report for sha256 {candidate.sha256}")
    failed = []
    for report in reports:
        # A report that was changed or cannot be read may have been of these bytes. A quick run
        # that passed is no proof, but does not block.
        full = report in of_these_bytes and report.content.get("quick") is not True
        if full or (missing and report in (of_these_bytes or reports)):
            found = against[report.path]
        else:
            counts = report in of_these_bytes or report.problems
            found = [*run_problems(report)] if counts else []
        problems += [f"{report.where}: {problem}" for problem in found]
        failed += [f"{report.where}: {each}" for each in failures(report, candidate.sha256)]
    allowed = policy.unverified_architectures
    unverified = {name: allowed.get(name) for name in held if name not in verified}
    readme = (root / README).read_text(encoding="utf-8")
    for name, entry in unverified.items():
        if name in policy.required_architectures:
            continue
        if entry is None:
            problems.append(f"{name}: unverified, and the release policy does not allow for that")
            continue
        if name not in readme:
            problems.append(f"{name}: unverified, but {README} does not name it")
        silent = [report for report in of_these_bytes if name not in report.names("unverified")]
        problems += [f"{name}: unverified, but {each.where} does not say so" for each in silent]
        found = [*ptx_problems(root, candidate, entry, policy)]
        problems += [f"{name}: {entry.ptx_report}: {problem}" for problem in found]
    return Verdict(
        candidate,
        tuple(dict.fromkeys(map(printable, [*problems, *failed]))),
        tuple(map(printable, failed)),
        verified,
        {name: entry.reason if entry else "" for name, entry in unverified.items()},
    )


def ptx_problems(
    root: Path, wheel: Candidate, allowed: Unverified, policy: Policy
) -> Iterator[str]:
    """Says why a run of PTX cannot be taken for one of an architecture's machine code.

    The wheel that ran held nothing else, else the driver would not have compiled it. Its report is
    in the tree; it must be of the sources and the toolkit of the wheel to be published.
    """
    report = read_report(root / allowed.ptx_report, root)
    yield from run_problems(report)
    if not report.content:
        return
    if allowed.ptx not in report.names("ran_as_ptx"):
        yield f"did not run {allowed.ptx} as PTX"
    number, stated = allowed.ptx.removeprefix("compute_"), wheel.manifest.get("sources", {})
    alike = {part: stated.get(part) for part in sources.NATIVE}
    same = {"architectures": [f"{number}-virtual"], "sources": alike}
    yield from build_problems(report, {**wheel.manifest, **same})
    # The golden hashes are of machine code, and PTX has one family. Its speed does not matter.
    rows = [name for name in policy.required_checks if name not in ("golden", "family")]
    yield from state_problems(report.content, ("contract", "accuracy"), rows)
