"""What a GPU machine leaves of a run: the report of `verify`, and the results of tests/gpu."""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from ..errors import RefusedError, differences
from .candidate import Candidate
from .policy import Policy

SCHEMA = "docs/verification.schema.json"
SCHEMA_VERSION = 2
GPU_TESTS = "gpu-tests.xml"  # JUnit's form, beside the report; the suite is named by the wheel
# A complete, passing run of an installed wheel on a GPU.
PASSED = {
    "complete": True, "source_tree": False, "device": "cuda", "status": "passed",
    "installed": {"matches_wheel": True},
}  # fmt: skip
_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+)(\d)([a-z]?)")


@dataclass(frozen=True)
class Report:
    """A report that was read.

    Attributes:
        path: The file.
        content: The JSON object; empty if it could not be read.
        problems: What is wrong with the file itself.
    """

    path: Path
    content: Mapping[str, Any] = field(repr=False)
    problems: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """The sha256 of the wheel that the report is of; "" if it names none."""
        return str(at(self.content, "wheel", "sha256") or "")

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"{self.path.parent.name}/{self.path.name}"

    def names(self, kind: str) -> tuple[str, ...]:
        """Architectures that "ran" ("sm_90"), "ran_as_ptx" ("compute_80") or are "unverified"."""
        found = at(self.content, "architectures", kind)
        return tuple(str(name) for name in found) if isinstance(found, list) else ()


def digest(content: Mapping[str, Any]) -> str:
    """The digest that a report carries: sha256 over the rest as canonical JSON.

    It shows accidental changes. A deliberate edit can include a new digest: see docs/releasing.md.
    """
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_schema(root: Path) -> dict[str, Any]:
    """Reads the JSON Schema of reports from a source tree."""
    try:
        found: dict[str, Any] = json.loads((root / SCHEMA).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError(f"schema: {SCHEMA} is unreadable ({error})") from error
    return found


def read_report(path: Path, schema: Mapping[str, Any]) -> Report:
    """Reads a report; its content is empty if it is not laid out as one of this project."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return Report(path, {}, (f"is unreadable ({error})",))
    if found := [*differences(content, {"schema_version": SCHEMA_VERSION})]:
        return Report(path, {}, tuple(found))
    problems = []
    if content.get("digest") != digest(content):
        problems.append("was changed after it was written: its digest is not that of its content")
    errors = sorted(Draft202012Validator(schema).iter_errors(content), key=lambda e: e.json_path)
    problems += [f"{error.json_path}: {error.message[:200]}" for error in errors[:3]]
    return Report(path, content, tuple(problems))


def proof_problems(
    report: Report, wheel: Candidate, policy: Policy, modules: Sequence[str]
) -> Iterator[str]:
    """Says why a run is no proof that a wheel works.

    Args:
        report: The report of the run.
        wheel: The wheel.
        policy: The release policy: what it must have passed.
        modules: Modules of tests/gpu, of each of which a test must have passed.
    """
    yield from run_problems(report)
    content = report.content
    if not content:
        return
    named = {"filename": wheel.path.name, "sha256": wheel.sha256}
    yield from differences(content, {"wheel": named, "quick": False})
    gpu = str(at(content, "environment", "gpu"))
    for name in report.names("ran"):
        wanted = policy.required_architectures.get(name)
        if wanted and not re.fullmatch(wanted, gpu, re.ASCII):
            yield f"ran {name} on {gpu[:80]!r}, which is none of {wanted}"
    yield from build_problems(report, wheel.manifest)
    yield from state_problems(content, policy.required_sections, policy.required_checks)
    passed, found = read_gpu_tests(report.path.with_name(GPU_TESTS), wheel.sha256)
    yield from found
    for module in modules:
        if not found and not any(f"{name}.".startswith(f"{module}.") for name in passed):
            yield f"{GPU_TESTS}: no test of {module} passed"


def read_gpu_tests(path: Path, sha256: str) -> tuple[list[str], list[str]]:
    """Reads the results of tests/gpu.

    Args:
        path: The file, in JUnit's form.
        sha256: Of the wheel that must have been installed.

    Returns:
        Test classes, a class for each test that passed, and what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # With NUL the parser would take it for UTF-16, where this search finds nothing.
        if any(word in text for word in ("\0", "<!DOCTYPE", "<!ENTITY")):
            raise ValueError("it declares entities, or is not UTF-8")
        (suite,) = ElementTree.fromstring(text).iter("testsuite")
    except (OSError, ValueError, ElementTree.ParseError) as error:
        return [], [f"{GPU_TESTS}: is unreadable ({error})"]
    passed, problems = [], [*differences(suite.attrib, {"name": f"sha256:{sha256}"}, GPU_TESTS)]
    for case in suite.iter("testcase"):
        states = {element.tag for element in case}
        if states & {"failure", "error"}:
            name = f"{case.get('classname')}::{case.get('name')}"
            problems.append(f"{GPU_TESTS}: failed: {name[:160]!r}")
        elif "skipped" not in states:
            passed.append(str(case.get("classname")))
    if {suite.get("failures"), suite.get("errors")} != {"0"} and not problems:
        problems.append(f"{GPU_TESTS}: counts failures that it does not list")
    return passed, problems


def failures(report: Report, sha256: str) -> list[str]:
    """What failed in a run of these bytes: it stands against them, whatever passes later."""
    if report.sha256 != sha256:
        return []
    found = [*state_problems(report.content)]
    if report.content.get("status") == "failed":
        found.append("its status is 'failed'")
    tests = read_gpu_tests(report.path.with_name(GPU_TESTS), sha256)[1]
    return [*found, *(problem for problem in tests if ": failed: " in problem)]


def run_problems(report: Report) -> Iterator[str]:
    """Says why a report is not one of a complete, passing run of an installed wheel on a GPU."""
    yield from report.problems
    if report.content:
        yield from differences(report.content, PASSED)
        capability = str(at(report.content, "environment", "compute_capability"))
        for name in (*report.names("ran"), *report.names("ran_as_ptx")):
            if not runs_on(name, capability):
                yield f"says that {name} ran on a GPU of compute capability {capability}"


def runs_on(architecture: str, capability: str) -> bool:
    """Tells whether code, such as "sm_90a" or "compute_80", can have run on a GPU ("9.0").

    Machine code runs on its own major capability, PTX on later ones too, and what has a letter on
    exactly its own.
    """
    found, gpu = _ARCHITECTURE.fullmatch(architecture), re.fullmatch(r"(\d+)\.(\d)", capability)
    if not found or not gpu:
        return False
    own, there = (int(found[1]), int(found[2])), (int(gpu[1]), int(gpu[2]))
    if found[3]:
        return own == there
    return own <= there and (architecture.startswith("compute_") or own[0] == there[0])


def build_problems(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Compares what a report states of the build with a build manifest."""
    keys = ("cuda_toolkit", "architectures", "deterministic", "bits_version", "sources")
    upstream = {key: at(manifest, "upstream", key) for key in ("version", "sha256")}
    pins = {"upstream": upstream, "patches": at(manifest, "upstream", "patches")}
    expected = {"build": {key: manifest.get(key) for key in keys}, "pins": pins}
    yield from differences(report.content, expected)
    if at(report.content, "build", "missing_kernels"):
        yield "says that the wheel lacks kernels"
    held = {str(name) for name in manifest.get("architectures") or ()}
    for name in (*report.names("ran"), *report.names("ran_as_ptx")):
        kind, _, number = name.partition("_")
        if not {number, f"{number}-{'real' if kind == 'sm' else 'virtual'}"} & held:
            yield f"says that {name} ran, which the wheel does not hold"


def state_problems(
    content: Mapping[str, Any], sections: Sequence[str] = (), checks: Sequence[str] = ()
) -> Iterator[str]:
    """Says which sections, and which rows of the contract, have not passed; others may not fail."""
    found = _rows(content.get("sections"))
    rows = [at(row, "data", "checks") for row in found if row.get("id") == "contract"]
    contract = [check for each in rows for check in _rows(each)]
    for kind, wanted, states in (
        ("section", sections, _states(found)),
        ("contract,", checks, _states(contract)),
    ):
        for name in dict.fromkeys((*wanted, *states)):
            state = states.get(name, "missing")
            if state.startswith(("failed", "error")) or (name in wanted and state != "passed"):
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
    """Looks up a value deep in a report that may be of any form; None if it is not there."""
    value: Any = content
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
