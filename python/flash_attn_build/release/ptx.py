"""The run of PTX that a release accepts where no GPU at hand can run the machine code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..compile import manifest as manifests
from ..compile import sources
from ..errors import RefusedError
from .candidate import Candidate
from .policy import Policy, Unverified
from .report import Report, build_problems, read_report, run_problems, state_problems

# Without those that take times: the speed of PTX does not matter here.
SECTIONS = ("contract", "accuracy")


def problems(
    root: Path, schema: Mapping[str, Any], wheel: Candidate, allowed: Unverified, policy: Policy
) -> Iterator[str]:
    """Says why a run of PTX cannot be taken for one of an architecture's machine code.

    The wheel that ran is not the one to be published: the driver compiles PTX only if the wheel
    holds no machine code for the GPU. Its report and manifest are in the tree. It must have been
    built as the wheel to be published, except for the architecture.

    Args:
        root: The source tree.
        schema: JSON Schema of reports.
        wheel: The wheel that is to be published.
        allowed: What the policy says of the architecture.
        policy: The release policy.
    """
    report = read_report(root / allowed.ptx_report, schema)
    # Beside `<name>.json` lies `<name>.manifest.json`, of the wheel that ran.
    path, text = Path(allowed.ptx_report).with_suffix(".manifest.json"), {}
    try:
        text = manifests.read(root / path)
        if report.content:
            for problem in manifest_problems(text, report, wheel, allowed.ptx):
                yield f"{path}: {problem}"
    except RefusedError as error:
        yield f"{path}: {error}"
    except (AttributeError, LookupError, TypeError) as error:
        yield f"{path}: is not a manifest ({error!r})"
    found = [*run_problems(report)]
    if report.content:
        if allowed.ptx not in report.names("ran_as_ptx"):
            found.append(f"did not run {allowed.ptx} as PTX")
        # The golden hashes are of machine code, and PTX has one family: these must not fail either.
        rows = [name for name in policy.required_checks if name not in ("golden", "family")]
        found += [*build_problems(report, text), *state_problems(report.content, SECTIONS, rows)]
    yield from (f"{allowed.ptx_report}: {problem}" for problem in found)


def manifest_problems(
    text: Mapping[str, Any], report: Report, wheel: Candidate, ptx: str
) -> Iterator[str]:
    """Says where the build of the wheel that ran differs from that of the wheel to be published.

    Args:
        text: The manifest of the wheel that ran.
        report: The report of that run.
        wheel: The wheel that is to be published.
        ptx: Such as "compute_80".
    """
    if text["wheel"]["sha256"] != report.sha256:
        yield f"is of another wheel (sha256 {text['wheel']['sha256']}) than the one that ran"
    number = ptx.removeprefix("compute_")
    if text["architectures"] != [f"{number}-virtual"]:
        yield f"expected {number}-virtual alone, got {', '.join(text['architectures'])}"
    build, ours = text["build"], wheel.manifest
    option = f"CMAKE_CUDA_ARCHITECTURES={number}-virtual"
    if build["preset"] != "release" or build["defines"] != [option] or build["environment"]:
        yield (
            f"expected preset 'release' with the option {option} alone, got {build['preset']!r}, "
            f"{' '.join(build['defines'])} {' '.join(build['environment'])}"
        )
    for key in ("upstream", "cuda_toolkit", "deterministic", "torch_target", "bits_version"):
        if text[key] != ours.get(key):
            yield f"{key}: {text[key]!r}, but the wheel to be published has {ours.get(key)!r}"
    # A family of kernels for a later architecture has no PTX of an earlier one.
    wanted = [each for each in ours.get("instances", ()) if _family(each) <= int(number)]
    if _sorted(text["instances"]) != _sorted(wanted):
        yield "its kernels are not those of the wheel to be published"
    stated = ours.get("sources", {})
    differing = [part for part in sources.NATIVE if text["sources"].get(part) != stated.get(part)]
    if differing:
        yield f"built from another tree: {', '.join(differing)}"


def _family(instance: Mapping[str, Any]) -> int:
    """The architecture that a kernel's family is for: 90 for "sm90"; 0 if it names none."""
    found = re.fullmatch(r"sm_?(\d+)[a-z]?", str(instance.get("family", "")))
    return int(found[1]) if found else 0


def _sorted(instances: list[Mapping[str, Any]]) -> list[str]:
    return sorted(json.dumps(each, sort_keys=True) for each in instances)
