"""Each way in which a wheel lacks its proof is refused, with its reason."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import release_samples
from flash_attn_build.files import ROOT
from flash_attn_build.release.candidate import read_candidate
from flash_attn_build.release.gate import find_runs, find_wheels, gpu_test_modules, judge
from flash_attn_build.release.report import digest, proof_problems, read_report, runs_on
from flash_attn_deterministic.verify import environment
from flash_attn_deterministic.verify.contract.checks import CHECKS
from release_samples import OTHER_WHEEL, POLICY, TAG, Change, Project, edit, put, sections


def test_a_wheel_with_its_proof_passes(project: Project) -> None:
    verdict = project.decide()
    assert verdict.problems == ()
    assert list(verdict.verified) == ["sm_90", "sm_90a"]
    assert list(verdict.unverified) == ["sm_80"]
    assert "no GPU" in verdict.unverified["sm_80"]
    (project.dist / "dev").mkdir()
    shutil.copy(project.wheel, project.dist / "dev")
    assert find_wheels(project.dist) == [project.wheel]


def rows(**states: str) -> Change:
    return lambda report: report.update(sections=sections(**states))


def in_row(**numbers: int) -> Change:
    """Changes the first row of the contract."""
    return lambda report: report["sections"][1]["data"]["checks"][0].update(numbers)


# Below the fields that `test_no_part_of_a_report_can_be_exchanged` exchanges.
VALUES: dict[str, object] = {
    "status": "incomplete",
    "wheel.sha256": "0" * 64,
    "wheel.filename": "x.whl",
    "installed.matches_wheel": None,
    "pins.upstream.version": "2.8.2",
    "pins.patches": [],
    "build.cuda_toolkit": "12.4.131",
    "build.bits_version": 9,
}
REPORTS: dict[str, tuple[Change, str]] = {
    **{path: (put(path, value), f"{path}: expected ") for path, value in VALUES.items()},
    "a section failed": (rows(contract="failed"), "section contract: failed"),
    "a section not run": (rows(decode="not-run"), "section decode: not-run"),
    "a section left out": (lambda r: r["sections"].pop(), "$.sections: [{"),
    "a section more": (lambda r: r["sections"].append({"id": "x"}), "$.sections: "),
    "a section twice": (
        lambda r: r["sections"].insert(0, r["sections"][1]), "$.sections[0].id: 'environment' was"
    ),
    "a row failed": (rows(paged="failed"), "contract, paged: failed"),
    "a row that did not apply": (rows(heads="not-applicable"), "contract, heads: not-applicable"),
    "a row twice": (
        lambda r: (c := r["sections"][1]["data"]["checks"]).insert(0, {**c[0], "status": "failed"}),
        "contract, run-to-run: failed",
    ),
    "a row left out": (
        lambda r: r["sections"][1]["data"]["checks"].pop(), "contract, golden: missing"
    ),
    "a row without a case": (in_row(cases=0), "contract, run-to-run: error: passed without a case"),
    "a row with failed cases": (in_row(failed=3), "contract, run-to-run: failed: 3 cases"),
    "rows left out": (lambda r: r["sections"][1].update(data={}), "'checks' is a required"),
    "schema": (lambda r: r.pop("status"), "'status' is a required property"),
    "architecture": (put("architectures.ran", ["sm_80"]), "sm_90: no complete, "),
    "family": (put("architectures.ran", ["sm_90"]), "sm_90a: no complete, "),
    "architecture not held": (
        put("architectures.ran", ["sm_90", "sm_90a", "sm_90b"]),
        "says that sm_90b ran, which the wheel does not hold",
    ),
    "unverified architecture not named": (
        put("architectures.unverified", []),
        "sm_80: unverified, but 1/verification.json does not say so",
    ),
    "A100": (
        put("environment.compute_capability", "8.0"),
        "says that sm_90 ran on a GPU of compute capability 8.0",
    ),
    "A100 that says 9.0": (
        put("environment.gpu", "NVIDIA A100"), "ran sm_90 on 'NVIDIA A100', which is none of NVIDIA"
    ),
    "no capability": (put("environment.compute_capability", None), "capability None"),
    "kernels": (
        put("build.missing_kernels", [{"direction": "bwd", "dtype": "bf16", "head_dim": 64}]),
        "says that the wheel lacks kernels",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), REPORTS.values(), ids=REPORTS)
def test_a_report_that_is_no_proof(project: Project, change: Change, expected: str) -> None:
    edit(project.report_path, change, sign=True)
    found = project.problems()
    assert expected in found
    assert "no complete, passing report" in found or "does not say so" in expected


def test_every_reason_is_told_at_once(project: Project) -> None:
    edit(project.report_path, lambda r: r.update(quick=True, complete=False))
    project.git("tag", "--delete", TAG)
    (project.root / "new").write_text("")
    found = project.problems()
    for expected in ("changed after", "quick: ", "complete: ", "no tag", "new"):
        assert expected in found
    shutil.rmtree(project.dist / "verification")
    assert "sm_90: no complete, passing report for sha256" in project.problems()


SECOND: dict[str, tuple[dict[str, Any], str]] = {
    "failed": ({"status": "failed"}, "2/verification.json: status: expected 'passed'"),
    # Cut short: neither the report nor the section says that it failed.
    "a row failed": (
        {"complete": False, "status": "incomplete", "sections": sections(chunk="failed")},
        "2/verification.json: contract, chunk: failed",
    ),
    "a row ended in an error": (
        {"sections": sections(chunk="error")}, "2/verification.json: contract, chunk: error"
    ),
    "quick": ({"quick": True}, ""),
    "of another wheel": ({"wheel": OTHER_WHEEL, "status": "failed"}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), SECOND.values(), ids=SECOND)
def test_what_failed_is_not_undone_by_another_report(
    project: Project, changes: dict[str, Any], expected: str
) -> None:
    project.add_report(**changes)
    found = project.problems()
    assert expected in found if expected else found == ""


@pytest.mark.parametrize("state", ["failed", "error"])
def test_a_row_that_the_policy_does_not_name_may_not_fail(project: Project, state: str) -> None:
    named = tuple(name for name in POLICY.required_checks if name != "dropout")
    project.policy = replace(project.policy, required_checks=named)
    assert project.problems() == ""
    edit(project.report_path, rows(dropout=state), sign=True)
    assert f"contract, dropout: {state}" in project.problems()


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "edited": (lambda text: text.replace("true", "false", 1), "was changed"),
    "truncated": (lambda text: text[: len(text) // 2], "is unreadable"),
    "nested": (lambda text: "[" * 99_999, "is unreadable"),
    "emptied": (lambda text: "{}", "$: 'schema_version' is a required property"),
    "a list": (lambda text: "[]", "$: [] is not of type 'object'"),
    "without its digest": (lambda text: text.replace('"digest"', '"other"'), "'other' was unexp"),
    "other bytes": (
        lambda text: re.sub('"sha256": "[0-9a-f]{8}', '"sha256": "00000000', text, count=1),
        "was changed",
    ),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_report_beside_a_passing_one_blocks(
    project: Project, damage: Callable[[str], str], expected: str
) -> None:
    """It may have been of these bytes, and failed."""
    second = project.add_report()
    assert project.problems() == ""
    second.write_text(damage(second.read_text()))
    found = project.problems()
    assert "2/verification.json: " in found
    assert expected in found


def test_a_run_that_left_no_report_or_a_link_blocks(project: Project, tmp_path: Path) -> None:
    second = project.dist / "verification" / "2"
    second.mkdir()
    assert "2/verification.json: is unreadable" in project.problems()
    project.add_report(status="failed").parent.rename(tmp_path / "elsewhere")
    second.symlink_to(tmp_path / "elsewhere")
    assert "its status is 'failed'" in project.problems()


@pytest.mark.parametrize(
    ("architecture", "capability", "expected"),
    [
        ("sm_90", "9.0", True), ("sm_80", "8.9", True), ("sm_86", "8.0", False),
        ("sm_80", "9.0", False), ("sm_90a", "9.0", True), ("sm_90a", "9.1", False),
        ("compute_80", "12.0", True), ("compute_100", "9.0", False), ("sm_100", "10.0", True),
        ("sm_90", "None", False), ("sm_", "9.0", False),
    ],
)  # fmt: skip
def test_what_runs_where(architecture: str, capability: str, expected: bool) -> None:
    assert runs_on(architecture, capability) == expected


def test_where_attestations_are_asked_for_no_other_report_may_lie_around(project: Project) -> None:
    project.add_report(status="failed", wheel=OTHER_WHEEL)
    arguments = ([project.wheel], find_runs(project.dist), project.policy, project.root)
    assert judge(*arguments)[1] == []
    (problem,) = judge(*arguments, allow_other_reports=False)[1]
    assert problem == "2/verification.json: is of no wheel of this release"


POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "another toolkit": (
        {"wheels": {"x86_64": "12.4.131"}},
        "made with CUDA 13.0.88, but the policy wants 12.4.131 for x86_64",
    ),
    "an architecture that it does not know": (
        {"unverified_architectures": {}},
        "sm_80: unverified, and the release policy does not allow",
    ),
    "an architecture that the wheel lacks": (
        {"required_architectures": {"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"}},
        "sm_100: the wheel holds no machine code for it",
    ),
}


@pytest.mark.parametrize(("changes", "expected"), POLICIES.values(), ids=POLICIES)
def test_what_the_policy_wants(project: Project, changes: dict[str, Any], expected: str) -> None:
    project.policy = replace(project.policy, **changes)
    assert expected in project.problems()


def test_an_unverified_architecture_that_the_readme_does_not_name(project: Project) -> None:
    readme = project.root / "README.md"
    readme.write_text(readme.read_text().replace("sm_80", "others"))
    assert "sm_80: unverified, but README.md does not name it" in project.problems()


PTX: dict[str, tuple[Change, str]] = {
    "cut short": (lambda r: r.update(complete=False), "complete: expected True"),
    "other PTX": (put("architectures.ran_as_ptx", []), "did not run compute_80 as PTX"),
    "nothing checked": (lambda r: r.update(sections=[]), "$.sections: [] "),
    "accuracy": (rows(accuracy="not-run"), "section accuracy: not-run"),
    "a row left out": (rows(paged="not-run"), "contract, paged: not-run"),
    "another section": (rows(forward="failed"), "section forward: failed"),
    "other patches": (put("pins.patches", []), "pins.patches: expected"),
    "other sources": (put("build.sources.cpp", "0" * 64), "build.sources.cpp: expected"),
    "another toolkit": (put("build.cuda_toolkit", "12.4.131"), "build.cuda_toolkit: expected"),
    "machine code beside it": (
        put("build.architectures", ["80-virtual", "90-real"]), "build.architectures: expected"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), PTX.values(), ids=PTX)
def test_a_run_of_ptx_that_does_not_stand_in(
    project: Project, change: Change, expected: str
) -> None:
    edit(project.ptx_path, change, sign=True)
    project.tag()
    assert f"sm_80: docs/results/verification-compute_80.json: {expected}" in project.problems()


def test_a_run_of_ptx_that_stands_in(project: Project) -> None:
    """Golden hashes are of machine code; a new version with the same kernels needs no new run."""
    passed = rows(golden="not-applicable", family="not-applicable", forward="not-run")
    other = put("build.sources", {**json.loads(project.ptx_path.read_text())["build"]["sources"],
                                  "pyproject.toml": "0" * 64})  # fmt: skip
    for change in (passed, other):
        edit(project.ptx_path, change, sign=True)
    project.tag()
    assert project.problems() == ""
    project.ptx_path.unlink()
    project.tag()
    assert "sm_80: docs/results/verification-compute_80.json: is unreadable" in project.problems()


def test_the_report_of_ptx_in_this_tree_is_there_or_missed() -> None:
    path = ROOT / POLICY.unverified_architectures["sm_80"].ptx_report
    said = "The gate is shut" in (ROOT / "docs" / "releasing.md").read_text()
    assert said == (not path.exists())


def test_the_schema_takes_the_reports_that_gpus_wrote() -> None:
    for path in (ROOT / "docs" / "results").glob("verification*.json"):
        assert read_report(path, ROOT).problems == (), path.name


FREE = ("environment", "digest", "started", "seconds", "baseline")  # of a report


def test_no_part_of_a_report_can_be_exchanged(intact: Project, tmp_path: Path) -> None:
    judged = read_candidate(intact.wheel, intact.root, intact.policy)
    content = json.loads(intact.report_path.read_text())
    path = tmp_path / "changed.json"
    release_samples.write_gpu_tests(tmp_path / "gpu-tests.xml", judged.sha256)
    for key in (key for key in content if key not in FREE):
        for value in (None, True, False, 0, 2, "", "x", [], ["x"], {}, {"x": 1}):
            changed = {**content, key: value}
            changed["digest"] = digest(changed)
            path.write_text(json.dumps(changed))
            report = read_report(path, intact.root)
            same = value is content[key] or (value == content[key] and value != 0)
            problems = list(proof_problems(report, judged, intact.policy, ()))
            assert problems or same, (key, value)


def test_the_policy_demands_what_reports_have() -> None:
    schema = release_samples.SCHEMA
    rows = schema["properties"]["sections"]["prefixItems"]
    assert list(POLICY.required_sections) == [row["properties"]["id"]["const"] for row in rows]
    listed = schema["$defs"]["check"]["properties"]["id"]["enum"]
    assert list(POLICY.required_checks) == listed == [check.id for check in CHECKS]


def test_gpu_tests_that_are_not_asked_for_exist() -> None:
    asked = gpu_test_modules(ROOT, POLICY)
    others = set(gpu_test_modules(ROOT, replace(POLICY, other_gpu_tests=()))) - set(asked)
    assert asked
    for name in POLICY.other_gpu_tests:
        assert any(name in module.split(".") for module in others), name


def test_a_run_on_hopper_proves_what_the_policy_demands_of_the_release() -> None:
    """All machine code of the real preset is demanded or let through by name."""
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    (release,) = (each for each in presets if each["name"] == "release")
    held = release["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"].split(";")
    found = environment.architectures(held, "9.0")
    assert set(found["ran"]) == set(POLICY.required_architectures)
    assert set(found["unverified"]) == set(POLICY.unverified_architectures)
    assert all(POLICY.required_architectures.values())
