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

from ..errors import differences
from ..files import read_json, read_regular
from . import schema
from .candidate import Candidate
from .policy import Policy

SCHEMA = "docs/verification.schema.json"
GPU_TESTS = "gpu-tests.xml"  # JUnit's form, beside the report; the suite is named by the wheel
# What pytest writes into each element of it: elements, @attributes and #text.
_JUNIT = {
    "testsuites": "testsuite @name",
    "testsuite": "properties testcase @name @errors @failures @skipped @tests @time @timestamp "
    "@hostname",
    "testcase": "properties skipped failure error system-out system-err @classname @name @time",
    "properties": "property", "property": "@name @value", "skipped": "@type @message #text",
    "failure": "@message #text", "error": "@message #text",
    "system-out": "#text", "system-err": "#text",
}  # fmt: skip
# A complete, passing run of an installed wheel on a GPU.
PASSED = {
    "complete": True, "source_tree": False, "device": "cuda", "status": "passed",
    "installed": {"matches_wheel": True},
}  # fmt: skip
_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d{1,4})(\d)([a-z]?)")


@dataclass(frozen=True)
class Report:
    """A report that was read, and what is wrong with the file itself."""

    path: Path
    content: Mapping[str, Any] = field(repr=False)  # empty if it is not laid out as in the schema
    problems: tuple[str, ...] = ()
    # What it says of itself, as far as it can be read: another layout hides no failure.
    sha256: str = ""  # of the wheel that it is of
    status: str = ""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"{self.path.parent.name}/{self.path.name}"

    def names(self, kind: str) -> Sequence[str]:
        """Architectures that "ran" ("sm_90"), "ran_as_ptx" ("compute_80") or are "unverified"."""
        found: Sequence[str] = self.content["architectures"][kind] if self.content else ()
        return found


def digest(content: Mapping[str, Any]) -> str:
    """The digest that a report carries: sha256 over the rest as canonical JSON.

    It shows accidental changes. A deliberate edit can include a new digest: see docs/releasing.md.
    """
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_report(path: Path, root: Path) -> Report:
    """Reads a report, by the schema of a source tree."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        return Report(path, {}, (f"is unreadable ({error})",))
    said = content if isinstance(content, dict) else {}
    wheel = said["wheel"] if isinstance(said.get("wheel"), dict) else {}
    names = (str(wheel.get("sha256") or ""), str(said.get("status")))
    if found := schema.problems(content, root / SCHEMA):
        return Report(path, {}, tuple(found), *names)
    if content["digest"] == digest(content):
        return Report(path, content, (), *names)
    changed = "was changed after it was written: its digest is not that of its content"
    return Report(path, content, (changed,), *names)


def proof_problems(
    report: Report, wheel: Candidate, policy: Policy, modules: Sequence[str]
) -> Iterator[str]:
    """Says why a run is no proof that a wheel works.

    Of each of `modules`, those of tests/gpu, a test must have passed.
    """
    yield from run_problems(report)
    if not (content := report.content):
        return
    named = {"filename": wheel.path.name, "sha256": wheel.sha256}
    yield from differences(content, {"wheel": named, "quick": False})
    gpu = str(content["environment"].get("gpu"))
    for name in report.names("ran"):
        wanted = policy.required_architectures.get(name, "")
        if not re.fullmatch(wanted, gpu, re.ASCII):
            of = wanted or "those that the policy names"
            yield f"ran {name} on {gpu[:80]!r}, which is none of {of}"
    yield from build_problems(report, wheel.manifest)
    yield from state_problems(content, policy.required_sections, policy.required_checks)
    passed, found = read_gpu_tests(report.path.with_name(GPU_TESTS), wheel.sha256)
    yield from found
    for module in modules:
        if not found and not any(f"{name}.".startswith(f"{module}.") for name in passed):
            yield f"{GPU_TESTS}: no test of {module} passed"


def read_gpu_tests(path: Path, sha256: str) -> tuple[list[str], list[str]]:
    """Reads the results of tests/gpu: a class for each test that passed, and problems."""
    try:
        text = read_regular(path).decode("utf-8")
        # With NUL the parser would take it for UTF-16, where this search finds nothing.
        if any(word in text for word in ("\0", "<!DOCTYPE", "<!ENTITY")):
            raise ValueError("it declares entities, or is not UTF-8")
        top = ElementTree.fromstring(text)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        return [], [f"{GPU_TESTS}: is unreadable ({error})"]
    passed, problems = [], list[str]()
    # Wherever it stands and whatever its namespace, a failure is one of these bytes.
    for above in top.iter():
        states = {element.tag.rpartition("}")[2] for element in above}
        if states & {"failure", "error"}:
            name = f"{above.get('classname')}::{above.get('name')}"
            problems.append(f"{GPU_TESTS}: failed: {name[:160]!r}")
        elif above.tag == "testcase" and "skipped" not in states:
            passed.append(str(above.get("classname")))
        held = {*(element.tag for element in above), *(f"@{name}" for name in above.attrib)}
        held |= {"#text" for text in (above.text, *(e.tail for e in above)) if (text or "").strip()}
        unexpected = held.difference(_JUNIT.get(above.tag, "").split())
        problems += [f"{GPU_TESTS}: holds {name!r} in {above.tag!r}" for name in unexpected]
    suites = top.findall("testsuite")
    if top.tag != "testsuites" or len(suites) != 1:
        return passed, [*problems, f"{GPU_TESTS}: is not one suite of tests"]
    tests, skipped = (str(len(suites[0].findall(f"testcase{t}"))) for t in ("", "[skipped]"))
    expected = {"name": f"sha256:{sha256}", "errors": "0", "failures": "0", "skipped": skipped}
    expected |= {"tests": tests, "collected": tests}  # tests/conftest.py writes the last one
    stated = {each.get("name"): each.get("value") for each in suites[0].iterfind("*/property")}
    return passed, [*problems, *differences(stated | suites[0].attrib, expected, GPU_TESTS)]


def failures(report: Report, sha256: str) -> list[str]:
    """What failed in a run of these bytes: it stands against them, whatever passes later."""
    tests = read_gpu_tests(report.path.with_name(GPU_TESTS), sha256)[1]
    failed = [problem for problem in tests if ": failed: " in problem]
    if report.sha256 != sha256:  # the tests beside it may be of these bytes all the same
        return [] if any(problem.startswith(f"{GPU_TESTS}.name: ") for problem in tests) else failed
    found = [*state_problems(report.content)] if report.content else []
    if report.status == "failed":
        found.append("its status is 'failed'")
    return [*found, *failed]


def run_problems(report: Report) -> Iterator[str]:
    """Says why a report is not one of a complete, passing run of an installed wheel on a GPU."""
    yield from report.problems
    if report.content:
        yield from differences(report.content, PASSED)
        capability = str(report.content["environment"].get("compute_capability"))
        for name in (*report.names("ran"), *report.names("ran_as_ptx")):
            if not runs_on(name, capability):
                yield f"says that {name} ran on a GPU of compute capability {capability}"


def runs_on(architecture: str, capability: str) -> bool:
    """Tells whether code, such as "sm_90a" or "compute_80", can have run on a GPU ("9.0").

    Machine code runs on its own major capability, PTX on later ones too, and what has a letter on
    exactly its own.
    """
    found, gpu = _ARCHITECTURE.fullmatch(architecture), re.fullmatch(r"(\d{1,4})\.(\d)", capability)
    if not found or not gpu:
        return False
    own, there = (int(found[1]), int(found[2])), (int(gpu[1]), int(gpu[2]))
    if found[3]:
        return own == there
    return own <= there and (architecture.startswith("compute_") or own[0] == there[0])


def build_problems(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Compares what a report states of the build with a build manifest."""
    keys = ("cuda_toolkit", "architectures", "deterministic", "bits_version", "sources")
    upstream = manifest.get("upstream", {})
    pins = {
        "upstream": {key: upstream.get(key) for key in ("name", "version", "sha256")},
        "patches": upstream.get("patches"),
    }
    expected = {"build": {key: manifest.get(key) for key in keys}, "pins": pins}
    yield from differences(report.content, expected)
    if report.content["build"].get("missing_kernels"):
        yield "says that the wheel lacks kernels"
    held = {*manifest.get("architectures", ())}
    for name in (*report.names("ran"), *report.names("ran_as_ptx")):
        kind, _, number = name.partition("_")
        if not {number, f"{number}-{'real' if kind == 'sm' else 'virtual'}"} & held:
            yield f"says that {name} ran, which the wheel does not hold"


def state_problems(
    content: Mapping[str, Any], sections: Sequence[str] = (), checks: Sequence[str] = ()
) -> Iterator[str]:
    """Says which sections, and which rows of the contract, have not passed; others may not fail."""
    found = {f"section {each['id']}": each["status"] for each in content["sections"]}
    for row in content["sections"][1]["data"]["checks"]:
        name, state = f"contract, {row['id']}", row["status"]
        if state == "passed" and not row["cases"]:
            state = "error: passed without a case"
        if state == "passed" and row["failed"]:
            state = f"failed: {row['failed']} cases"
        # A row that occurs twice has passed only if both have.
        found[name] = state if found.get(name, "passed") == "passed" else found[name]
    wanted = [f"section {name}" for name in sections] + [f"contract, {name}" for name in checks]
    for name in dict.fromkeys([*wanted, *found]):
        state = found.get(name, "missing")
        if state.startswith(("failed", "error")) or (name in wanted and state != "passed"):
            yield f"{name}: {state}"
