"""A verification report, held to the wheel that it is said to be of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from .candidate import Candidate
from .policy import Policy

SCHEMA_VERSION = 1
_BAD = ("failed", "error")


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
        """Architectures that it says nobody could verify."""
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


def read_report(path: Path, schema: Mapping[str, Any]) -> Report:
    """Reads a report.

    Args:
        path: The file, `verification.json`.
        schema: JSON Schema of reports.

    Returns:
        The report, with what is wrong with the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return Report(path, {}, (f"is unreadable ({error})",))
    return parse_report(path, data, schema)


def parse_report(path: Path, data: bytes, schema: Mapping[str, Any]) -> Report:
    """Reads a report that is in memory.

    Args:
        path: What to call it.
        data: The content of the file.
        schema: JSON Schema of reports.

    Returns:
        The report, with what is wrong with it.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
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
    yield from report.faults
    content = report.content
    if not content or report.content.get("schema_version") != SCHEMA_VERSION:
        return
    if report.sha256 != wheel.sha256:
        yield f"is for other bytes (sha256 {report.sha256 or 'not named'})"
    if content.get("complete") is not True:
        yield "is not complete: the run was cut short"
    if content.get("quick") is not False:
        yield "is of a quick run"
    if content.get("source_tree") is not False:
        yield "was run against the source tree, not the installed wheel"
    if content.get("device") != "cuda":
        yield f"ran on {content.get('device')!r}, not on a GPU"
    if at(content, "installed", "matches_wheel") is not True:
        yield "the installed files were not those of the wheel"
    if content.get("status") != "passed":
        yield f"its status is {content.get('status')!r}, not 'passed'"
    yield from section_faults(content, policy.required_sections)
    yield from check_faults(content, policy.required_checks)
    yield from pin_faults(content, wheel)


def failed(report: Report) -> bool:
    """Says whether a report tells of a failure, which another report does not undo.

    Args:
        report: The report.

    Returns:
        Whether it, a section of it or a row of its contract failed.
    """
    states = [
        report.content.get("status"),
        *_states(report.content.get("sections")).values(),
        *_check_states(report.content).values(),
    ]
    return any(state in _BAD for state in states)


def section_faults(
    content: Mapping[str, Any], wanted: Sequence[str], *, others: bool = True
) -> Iterator[str]:
    """Says which sections have not passed.

    Args:
        content: The report.
        wanted: Sections that must have passed.
        others: Whether none of the rest may have failed.

    Yields:
        Every reason.
    """
    states = _states(content.get("sections"))
    for name in wanted:
        if name not in states:
            yield f"section {name} is missing"
        elif states[name] != "passed":
            yield f"section {name}: {states[name]}"
    for name, state in states.items():
        if others and name not in wanted and state in _BAD:
            yield f"section {name}: {state}"


def check_faults(content: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[str]:
    """Says which rows of the contract have not passed.

    Args:
        content: The report.
        wanted: Rows that must have passed; of the rest none may have failed.

    Yields:
        Every reason.
    """
    states = _check_states(content)
    for name in wanted:
        if states.get(name) != "passed":
            yield f"contract, {name}: {states.get(name, 'missing')}"
    for name, state in states.items():
        if name not in wanted and state in _BAD:
            yield f"contract, {name}: {state}"


def _check_states(content: Mapping[str, Any]) -> dict[str, str]:
    """Status of each row of the contract."""
    sections = content.get("sections")
    rows: list[object] = []
    for section in sections if isinstance(sections, list) else []:
        if isinstance(section, dict) and section.get("id") == "contract":
            found = at(section, "data", "checks")
            rows += found if isinstance(found, list) else []
    return _states(rows)


def _states(rows: object) -> dict[str, str]:
    """Status by id, of sections or of checks."""
    states: dict[str, str] = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict):
            name, state = str(row.get("id")), str(row.get("status"))
            # A section that is there twice passed only if both did.
            states[name] = state if states.get(name, "passed") == "passed" else states[name]
    return states


def pin_faults(content: Mapping[str, Any], wheel: Candidate) -> Iterator[str]:
    """Says where a report is of another upstream, or of other patches, than a wheel.

    Args:
        content: The report.
        wheel: The wheel.

    Yields:
        Every reason.
    """
    expected = wheel.upstream
    upstream = {key: expected.get(key) for key in ("version", "sha256")}
    stated = at(content, "pins", "upstream")
    stated = stated if isinstance(stated, dict) else {}
    if any(stated.get(key) != value for key, value in upstream.items()):
        yield "its upstream is not that of the manifest"
    if at(content, "pins", "patches") != expected.get("patches"):
        yield "its patches are not those of the manifest"


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
        value = value.get(key) if isinstance(value, dict) else None
    return value
