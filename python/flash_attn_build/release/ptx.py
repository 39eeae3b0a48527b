"""The run of PTX that a release accepts where no GPU at hand can run the machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..compile import manifest as manifests
from ..compile import sources
from ..errors import RefusedError, differences
from .candidate import Candidate
from .policy import Policy, Unverified
from .report import Report, build_problems, read_report, run_problems, state_problems

# Without those that take times: the speed of PTX does not matter here.
SECTIONS = ("contract", "accuracy")


def problems(root: Path, wheel: Candidate, allowed: Unverified, policy: Policy) -> Iterator[str]:
    """Says why a run of PTX cannot be taken for one of an architecture's machine code.

    The wheel that ran is not the one to be published: the driver compiles PTX only if the wheel
    holds no machine code for the GPU. Its report and manifest are in the tree. It must have been
    built as the wheel to be published, except for the architecture.
    """
    report = read_report(root / allowed.ptx_report, root)
    # Beside `<name>.json` lies `<name>.manifest.json`, of the wheel that ran.
    path, text = Path(allowed.ptx_report).with_suffix(".manifest.json"), {}
    try:
        text = manifests.read(root / path)
        if report.content:
            for problem in manifest_problems(text, report, wheel, allowed.ptx):
                yield f"{path}: {problem}"
    except RefusedError as error:
        yield f"{path}: {error}"
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
    """Says where the build of the wheel that ran differs from that of the wheel to be published."""
    number, ours = ptx.removeprefix("compute_"), wheel.manifest
    same = ("upstream", "cuda_toolkit", "deterministic", "torch_target", "bits_version")
    build = {
        "preset": "release", "environment": {},
        "defines": [f"CMAKE_CUDA_ARCHITECTURES={number}-virtual"],
    }  # fmt: skip
    stated = ours.get("sources", {})
    expected = {
        "wheel": {"sha256": report.sha256},
        "architectures": [f"{number}-virtual"],
        "build": build,
        **{key: ours.get(key) for key in same},
        "sources": {part: stated.get(part) for part in sources.NATIVE},
        # A family of kernels for a later architecture has no PTX of an earlier one.
        "instances": [each for each in ours.get("instances", ()) if _family(each) <= int(number)],
    }
    yield from differences(text, expected)


def _family(instance: Mapping[str, Any]) -> int:
    """The architecture that a kernel's family is for: 90 for "sm90"; 0 if it names none."""
    found = re.fullmatch(r"sm_?(\d+)[a-z]?", str(instance.get("family", "")))
    return int(found[1]) if found else 0
