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
        faults: Why the file itself is not to be believed.
    """

    path: Path
    content: Mapping[str, Any] = field(repr=False)
    faults: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """The sha256 of the wheel that the report is of; "" if it names none."""
        return str(at(self.content, "wheel", "sha256") or "")

    @property
    def ran(self) -> tuple[str, ...]:
        """Architectures whose machine code ran, such as "sm_90"."""
        return _names(self.content, "ran")

    @property
    def ran_as_ptx(self) -> tuple[str, ...]:
        """PTX that the driver compiled and that ran, such as "compute_80"."""
        return _names(self.content, "ran_as_ptx")

    @property
    def unverified(self) -> tuple[str, ...]:
        """Architectures that it says were not verified."""
        return _names(self.content, "unverified")


def digest(content: Mapping[str, Any]) -> str:
    """Computes the digest that a report carries.

    It tells of slips and casual edits. Whoever edits on purpose can compute it anew: against that
    stands the provenance of the build, which binds the wheel's sha256 to the workflow that ran.

    Args:
        content: The report; its own "digest" is left out.

    Returns:
        Hexadecimal sha256 over the rest as canonical JSON (keys sorted, no spaces, ASCII).
    """
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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


def read_report(path: Path, schema: Mapping[str, Any]) -> Report:
    """Reads a report.

    Args:
        path: The file.
        schema: JSON Schema of reports.

    Returns:
        The report, with what is wrong with the file.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return Report(path, {}, (f"is unreadable ({error})",))
    if not isinstance(content, dict):
        return Report(path, {}, ("is not a report: expected a JSON object",))
    return Report(path, content, content_faults(content, schema))


def content_faults(content: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Says why the content of a file is not to be believed, whatever wheel it is of.

    Args:
        content: The JSON object.
        schema: JSON Schema of reports.

    Returns:
        Every reason.
    """
    if content.get("schema_version") != SCHEMA_VERSION:
        found = content.get("schema_version")
        return (f"expected schema_version {SCHEMA_VERSION}, got {found!r}",)
    faults = []
    if content.get("digest") != digest(content):
        faults.append("was changed after it was written: its digest is not that of its content")
    errors = sorted(Draft202012Validator(schema).iter_errors(content), key=lambda e: e.json_path)
    faults += [f"{error.json_path}: {error.message[:200]}" for error in errors[:3]]
    return tuple(faults)


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
    if not content or content.get("schema_version") != SCHEMA_VERSION:
        return
    if report.sha256 != wheel.sha256:
        yield f"is for other bytes (sha256 {report.sha256 or 'not named'})"
    if content.get("quick") is not False:
        yield "is of a quick run"
    for name in report.ran:
        gpus = policy.required_architectures.get(name)
        gpu = str(at(content, "environment", "gpu"))
        if gpus and not any(word in gpu for word in gpus):
            yield f"ran {name} on {gpu!r}, which is none of {', '.join(gpus)}"
    yield from build_faults(content, wheel.manifest)
    yield from state_faults(content, policy.required_sections, policy.required_checks)


def run_faults(report: Report) -> Iterator[str]:
    """Says why a report is not that of a complete run of an installed wheel on a GPU, that passed.

    Args:
        report: The report.

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
        yield "was run against the source tree, not the installed wheel"
    if content.get("device") != "cuda":
        yield f"ran on {content.get('device')!r}, not on a GPU"
    if at(content, "installed", "matches_wheel") is not True:
        yield "the installed files were not those of the wheel"
    if content.get("status") != "passed":
        yield f"its status is {content.get('status')!r}, not 'passed'"
    capability = str(at(content, "environment", "compute_capability"))
    for name in (*report.ran, *report.ran_as_ptx):
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


def build_faults(content: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[str]:
    """Says where what a report says of the build is not what a manifest says.

    Args:
        content: The report.
        manifest: The build manifest.

    Yields:
        Every reason.
    """
    for key in ("cuda_toolkit", "architectures", "deterministic", "bits_version"):
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
    for name in (*_names(content, "ran"), *_names(content, "ran_as_ptx")):
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
            if state in _BAD or (name in wanted and state != "passed"):
                yield f"{kind} {name}: {state}"


def _rows(value: object) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _states(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Status by id, of sections or of checks."""
    states: dict[str, str] = {}
    for row in rows:
        name, state = str(row.get("id")), str(row.get("status"))
        # A section that is there twice passed only if both did.
        states[name] = state if states.get(name, "passed") == "passed" else states[name]
    return states


def _names(content: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = at(content, "architectures", key)
    return tuple(str(name) for name in found) if isinstance(found, list) else ()


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
