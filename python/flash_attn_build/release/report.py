"""A verification report: is it whole, did it pass, and is it of this wheel on such a GPU?"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from ..errors import RefusedError
from .candidate import Candidate
from .policy import Policy

SCHEMA = "docs/verification.schema.json"
SCHEMA_VERSION = 1
_BAD = ("failed", "error")
_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+)(\d)([a-z]?)")


@dataclass(frozen=True)
class Report:
    """A report that was read.

    Attributes:
        path: The file.
        content: The JSON object; empty if it could not be read.
        faults: What is wrong with the file itself.
    """

    path: Path
    content: Mapping[str, Any] = field(repr=False)
    faults: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """The sha256 of the wheel that the report is of; "" if it names none."""
        return str(at(self.content, "wheel", "sha256") or "")

    def names(self, kind: str) -> tuple[str, ...]:
        """Names the architectures of one kind in it.

        Args:
            kind: "ran": machine code, such as "sm_90"; "ran_as_ptx": PTX that the driver compiled,
                such as "compute_80"; "unverified": neither.
        """
        found = at(self.content, "architectures", kind)
        return tuple(str(name) for name in found) if isinstance(found, list) else ()


def digest(content: Mapping[str, Any]) -> str:
    """Computes the digest that a report carries.

    It shows accidental changes. A deliberate edit can include a new digest; the attestation of the
    build, which binds the wheel's sha256 to the workflow that ran, protects against that.

    Args:
        content: The report; its own "digest" is left out.

    Returns:
        Hexadecimal sha256 over the rest as canonical JSON (keys sorted, no spaces, ASCII).
    """
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_schema(root: Path) -> dict[str, Any]:
    """Reads the JSON Schema of reports.

    Args:
        root: The source tree.

    Returns:
        The schema.

    Raises:
        RefusedError: It cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((root / SCHEMA).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"schema: {SCHEMA} is unreadable, so no report can be checked ({error})"
        ) from error
    return found


def read_report(path: Path, schema: Mapping[str, Any]) -> Report:
    """Reads a report.

    Args:
        path: The file.
        schema: JSON Schema of reports.

    Returns:
        The report, with what is wrong with the file. Its content is empty if it is not laid out as
        a report of this project.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return Report(path, {}, (f"is unreadable ({error})",))
    if not isinstance(content, dict):
        return Report(path, {}, ("is not a report: expected a JSON object",))
    if (found := content.get("schema_version")) != SCHEMA_VERSION:
        return Report(path, {}, (f"expected schema_version {SCHEMA_VERSION}, got {found!r}",))
    faults = []
    if content.get("digest") != digest(content):
        faults.append("was changed after it was written: its digest is not that of its content")
    errors = sorted(Draft202012Validator(schema).iter_errors(content), key=lambda e: e.json_path)
    faults += [f"{error.json_path}: {error.message[:200]}" for error in errors[:3]]
    return Report(path, content, tuple(faults))


def faults(report: Report, wheel: Candidate, policy: Policy) -> Iterator[str]:
    """Says why a report is no proof that a wheel works.

    Args:
        report: The report.
        wheel: The wheel.
        policy: The release policy: what it must have passed.

    Yields:
        Every reason.
    """
    yield from run_faults(report)
    content = report.content
    if not content:
        return
    if report.sha256 != wheel.sha256:
        yield f"is for other bytes (sha256 {report.sha256 or 'not named'})"
    elif (found := at(content, "wheel", "filename")) != wheel.path.name:
        yield f"is for a wheel of another name ({found})"
    if content.get("quick") is not False:
        yield "is of a quick run"
    for name in report.names("ran"):
        gpus = policy.required_architectures.get(name)
        gpu = str(at(content, "environment", "gpu"))
        if gpus and not any(word in gpu for word in gpus):
            yield f"ran {name} on {gpu!r}, which is none of {', '.join(gpus)}"
    yield from build_faults(report, wheel.manifest)
    yield from state_faults(content, policy.required_sections, policy.required_checks)


def run_faults(report: Report) -> Iterator[str]:
    """Says why a report is not one of a complete, passing run of an installed wheel on a GPU.

    Args:
        report: The report.

    Yields:
        Every reason.
    """
    yield from report.faults
    content = report.content
    if not content:
        return
    if content.get("complete") is not True:
        yield "is not complete: the run was cut short"
    if content.get("source_tree") is not False:
        yield "was run against the source tree, not the installed wheel"
    if content.get("device") != "cuda":
        yield f"ran on {content.get('device')!r}, not on a GPU"
    if at(content, "installed", "matches_wheel") is not True:
        yield "the installed files were not those of the wheel"
    if content.get("status") != "passed":
        yield f"its status is {content.get('status')!r}, not 'passed'"
    capability = str(at(content, "environment", "compute_capability"))
    for name in (*report.names("ran"), *report.names("ran_as_ptx")):
        if not runs_on(name, capability):
            yield f"says that {name} ran on a GPU of compute capability {capability}"


def runs_on(architecture: str, capability: str) -> bool:
    """Tells whether code can have run on a GPU.

    Args:
        architecture: Such as "sm_90", "sm_90a" or "compute_80".
        capability: Compute capability of the GPU, such as "9.0".

    Returns:
        Whether it can: machine code runs on its own major capability, PTX on later ones too, and
        what has a letter on exactly its own.
    """
    found, gpu = _ARCHITECTURE.fullmatch(architecture), re.fullmatch(r"(\d+)\.(\d)", capability)
    if not found or not gpu:
        return False
    own, there = (int(found[1]), int(found[2])), (int(gpu[1]), int(gpu[2]))
    if found[3]:
        return own == there
    return own <= there and (architecture.startswith("compute_") or own[0] == there[0])


def build_faults(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Compares what a report states of the build with a manifest.

    Args:
        report: The report.
        manifest: The build manifest.

    Yields:
        Every reason.
    """
    content = report.content
    for key in ("cuda_toolkit", "architectures", "deterministic", "bits_version", "sources"):
        if at(content, "build", key) != manifest.get(key):
            yield f"its build's {key} is not that of the manifest"
    for key in ("version", "sha256"):
        if at(content, "pins", "upstream", key) != at(manifest, "upstream", key):
            yield "its upstream is not that of the manifest"
    if at(content, "pins", "patches") != at(manifest, "upstream", "patches"):
        yield "its patches are not those of the manifest"
    if at(content, "build", "missing_kernels"):
        yield "says that the wheel lacks kernels"
    held = {str(name) for name in manifest.get("architectures") or ()}
    for name in (*report.names("ran"), *report.names("ran_as_ptx")):
        kind, _, number = name.partition("_")
        suffix = "-real" if kind == "sm" else "-virtual"
        if not {number, number + suffix} & held:
            yield f"says that {name} ran, which the wheel does not hold"


def state_faults(
    content: Mapping[str, Any], sections: Sequence[str] = (), checks: Sequence[str] = ()
) -> Iterator[str]:
    """Says which sections, and which rows of the contract, have not passed.

    Args:
        content: The report.
        sections: Sections that must have passed; of the rest none may have failed.
        checks: Rows of the contract, likewise.

    Yields:
        Every reason.
    """
    found = _rows(content.get("sections"))
    rows = [at(row, "data", "checks") for row in found if row.get("id") == "contract"]
    contract = [check for each in rows for check in _rows(each)]
    for kind, wanted, states in (
        ("section", sections, _states(found)),
        ("contract,", checks, _states(contract)),
    ):
        for name in (*wanted, *(name for name in states if name not in wanted)):
            state = states.get(name, "missing")
            if state.startswith(_BAD) or (name in wanted and state != "passed"):
                yield f"{kind} {name}: {state}"


def _rows(value: object) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _states(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Status by id, of sections or of checks."""
    states: dict[str, str] = {}
    for row in rows:
        name, state = str(row.get("id")), str(row.get("status"))
        if state == "passed" and row.get("cases") == 0:
            state = "error: passed without a case"
        if state == "passed" and row.get("failed"):
            state = f"failed: {row['failed']} cases"
        # A section that occurs twice has passed only if both have.
        states[name] = state if states.get(name, "passed") == "passed" else states[name]
    return states


def at(content: Mapping[str, Any], *keys: str) -> Any:
    """Looks up a value deep in a report that may be of any form.

    Args:
        content: The report, or a part of it.
        keys: The way there.

    Returns:
        The value; None if it is not there.
    """
    value: Any = content
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
