"""Each way in which a wheel lacks its proof is refused, with its reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import release_samples
from fake_wheel import VERSION
from flash_attn_build.files import ROOT
from flash_attn_build.release.candidate import read_candidate
from flash_attn_build.release.gate import gpu_test_modules
from flash_attn_build.release.report import digest, proof_problems, read_report, runs_on
from flash_attn_build.release.tree import problems
from flash_attn_deterministic.verify import environment
from flash_attn_deterministic.verify.contract.checks import CHECKS
from release_samples import POLICY, TAG, Change, Project, edit, put, sections


def rows(**states: str) -> Change:
    return lambda report: report.update(sections=sections(**states))


def test_every_reason_is_told_at_once(project: Project) -> None:
    edit(project.report_path, lambda r: r.update(quick=True, complete=False))
    project.git("tag", "--delete", TAG)
    (project.root / "new").write_text("")
    found = project.problems()
    for expected in ("changed after", "quick: ", "complete: ", "no tag", "new"):
        assert expected in found
    shutil.rmtree(project.dist / "verification")
    assert "sm_90: no complete, passing report for sha256" in project.problems()


@pytest.mark.parametrize("state", ["failed", "error"])
def test_a_row_that_the_policy_does_not_name_may_not_fail(project: Project, state: str) -> None:
    named = tuple(name for name in POLICY.required_checks if name != "dropout")
    project.policy = replace(project.policy, required_checks=named)
    assert project.problems() == ""
    edit(project.report_path, rows(dropout=state), sign=True)
    assert f"contract, dropout: {state}" in project.problems()


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


def told(project: Project) -> str:
    return "\n".join(problems(project.root, VERSION))


def test_another_tag_or_none(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.git("tag", "v0.0.2")
    project.git("tag", "--delete", TAG)
    assert f"is not tagged {TAG}: it has v0.0.2" in told(project)
    project.git("commit", "--quiet", "--allow-empty", "-m", "later")
    assert f"is not tagged {TAG}: it has no tag" in told(project)
    shutil.rmtree(project.root / ".git")
    assert told(project).startswith("tree: git does not know what is checked out")
    monkeypatch.setenv("PATH", str(project.dist))
    assert told(project).startswith("tree: git does not know what is checked out")
