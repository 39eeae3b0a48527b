"""The run of PTX that stands in for machine code which no GPU at hand can run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import sources
from .candidate import Candidate
from .policy import Policy, Unverified
from .report import (
    SCHEMA_VERSION,
    Report,
    at,
    check_faults,
    pin_faults,
    read_report,
    section_faults,
)

# How fast PTX is, is of no account.
SECTIONS = ("contract", "accuracy")
# PTX runs by itself only in a wheel that holds no machine code for the GPU.
_ALLOWED_OPTION = "CMAKE_CUDA_ARCHITECTURES="


def faults(
    root: Path, schema: Mapping[str, Any], wheel: Candidate, allowed: Unverified, policy: Policy
) -> Iterator[str]:
    """Says why no run of PTX stands in for an architecture's machine code.

    The wheel that ran is another than the one to be published: built earlier, since its report is
    in the tree. So the manifest of the wheel that ran lies beside the report, and says what that
    wheel was compiled from.

    Args:
        root: The source tree.
        schema: JSON Schema of reports.
        wheel: The wheel that is to be published.
        allowed: What the policy says of the architecture.
        policy: The release policy.

    Yields:
        Every reason.
    """
    report = read_report(root / allowed.ptx_report, schema)
    for fault in report_faults(report, wheel, allowed.ptx, policy):
        yield f"{allowed.ptx_report}: {fault}"
    if not report.content:
        return
    path = manifest_path(allowed.ptx_report)
    for fault in manifest_faults(root / path, report, wheel):
        yield f"{path}: {fault}"


def manifest_path(report: str) -> str:
    """Names the manifest of the wheel that ran.

    Args:
        report: The report's path, `<name>.json`.

    Returns:
        `<name>.manifest.json`.
    """
    return f"{report.removesuffix('.json')}.manifest.json"


def report_faults(report: Report, wheel: Candidate, ptx: str, policy: Policy) -> Iterator[str]:
    """Says why a report does not show that PTX works.

    Args:
        report: The report.
        wheel: The wheel that is to be published: both must be of one upstream and its patches.
        ptx: Such as "compute_80".
        policy: The release policy: the rows of the contract that must have passed.

    Yields:
        Every reason.
    """
    yield from report.faults
    content = report.content
    if not content or content.get("schema_version") != SCHEMA_VERSION:
        return
    if content.get("complete") is not True:
        yield "is not complete: the run was cut short"
    if content.get("source_tree") is not False:
        yield "was run against the source tree, not an installed wheel"
    if content.get("device") != "cuda":
        yield f"ran on {content.get('device')!r}, not on a GPU"
    if at(content, "installed", "matches_wheel") is not True:
        yield "the installed files were not those of a wheel"
    if ptx not in report.ran_as_ptx:
        yield f"did not run {ptx} as PTX"
    yield from section_faults(content, SECTIONS, others=False)
    yield from check_faults(content, policy.required_checks)
    yield from pin_faults(content, wheel)


def manifest_faults(path: Path, report: Report, wheel: Candidate) -> Iterator[str]:
    """Says why a manifest does not show that what ran is of the same sources.

    Args:
        path: The manifest of the wheel that ran.
        report: The report of that run.
        wheel: The wheel that is to be published.

    Yields:
        Every reason.
    """
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
        of, build, stated = text["wheel"]["sha256"], text["build"], text["sources"]
        options = [word for word in build["defines"] if not word.startswith(_ALLOWED_OPTION)]
        options += sorted(build["environment"])
        differing = [
            part for part in sources.NATIVE
            if stated.get(part) != at(wheel.manifest, "sources", part)
        ]  # fmt: skip
    except (OSError, ValueError) as error:
        yield f"is unreadable ({error})"
        return
    except (AttributeError, LookupError, TypeError) as error:
        yield f"is not a manifest ({error!r})"
        return
    if of != report.sha256:
        yield f"is of another wheel (sha256 {of}) than the one that ran"
    if options:
        yield f"built with options of its own: {' '.join(options)}"
    if differing:
        yield f"built from another tree: {', '.join(differing)}"
