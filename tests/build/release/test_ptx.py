"""A run of PTX stands in for machine code that no GPU at hand runs, and no other run does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flash_attn_build.compile import sources
from flash_attn_build.files import ROOT
from flash_attn_build.release import ptx
from flash_attn_build.release.candidate import read_candidate
from flash_attn_build.release.report import read_report, run_problems
from release_samples import POLICY, Project, edit, put, sections

ENTRY = POLICY.unverified_architectures["sm_80"]
WHERE = "docs/results/verification-compute_80"


def problems(project: Project) -> list[str]:
    wheel = read_candidate(project.wheel, project.root, project.policy)
    return list(ptx.problems(project.root, wheel, ENTRY, POLICY))


REPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "cut short": ({"complete": False}, "complete: expected True"),
    "other PTX": (
        {"architectures": {"ran": [], "ran_as_ptx": [], "unverified": []}},
        "did not run compute_80 as PTX",
    ),
    "nothing checked": ({"sections": []}, "$.sections: [] "),
    "accuracy": ({"sections": sections(accuracy="not-run")}, "section accuracy: not-run"),
    "a row left out": ({"sections": sections(paged="not-run")}, "contract, paged: not-run"),
    "another section": ({"sections": sections(decode="failed")}, "section decode: failed"),
    "other patches": (
        {"pins": {"upstream": {"name": "x", "version": "1", "sha256": ""}, "patches": []}},
        "pins.upstream.version: expected",
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REPORTS.values(), ids=REPORTS)
def test_a_report_that_does_not_stand_in(
    project: Project, changes: dict[str, Any], expected: str
) -> None:
    edit(project.ptx_path, lambda report: report.update(changes), sign=True)
    assert f"{WHERE}.json: {expected}" in "\n".join(problems(project))
    project.tag()
    assert f"sm_80: {WHERE}.json: {expected}" in project.problems()


def test_neither_report_nor_manifest(project: Project) -> None:
    project.ptx_path.unlink()
    (problem,) = problems(project)
    assert problem.startswith(f"{WHERE}.json: is unreadable")
    project.ptx_manifest.unlink()
    assert (
        f"{WHERE}.manifest.json: verification-compute_80.manifest.json is missing"
        in (problems(project)[0])
    )


def test_rows_that_ptx_cannot_pass_are_not_asked_for(project: Project) -> None:
    """Golden hashes are of machine code, and PTX has one family of kernels."""
    passed = sections(golden="not-applicable", family="not-applicable", forward="not-run")
    edit(project.ptx_path, lambda report: report.update(sections=passed), sign=True)
    assert problems(project) == []


MANIFEST: dict[str, object] = {
    "wheel.sha256": "0" * 64,
    "sources.cpp": "0" * 64,
    "build.preset": "dev",
    "build.defines": ["CMAKE_CUDA_ARCHITECTURES=80-virtual", "CMAKE_CUDA_FLAGS=-G"],
    "build.environment": {"CUDAFLAGS": "-G"},
    "instances": [],
    "cuda_toolkit": "12.4.131",
    "deterministic": False,
    "bits_version": 9,
    "upstream.version": "9",
    "architectures": ["80-virtual", "90-real"],
}


@pytest.mark.parametrize(("path", "value"), MANIFEST.items(), ids=MANIFEST)
def test_a_manifest_of_something_else(project: Project, path: str, value: object) -> None:
    edit(project.ptx_manifest, put(path, value))
    assert f"{WHERE}.manifest.json: {path}: expected" in "\n".join(problems(project))


def test_a_manifest_of_another_form(project: Project) -> None:
    edit(project.ptx_manifest, lambda manifest: manifest.pop("sources"))
    assert f"{WHERE}.manifest.json: sources.cpp: expected" in "\n".join(problems(project))
    edit(project.ptx_manifest, put("schema", 2))
    assert f"{WHERE}.manifest.json: expected schema 4" in "\n".join(problems(project))


def test_a_new_version_with_the_same_kernels_needs_no_new_run(project: Project) -> None:
    other = {"pyproject.toml": "0" * 64}
    edit(project.ptx_manifest, lambda m: m["sources"].update(other))
    assert "build.sources.pyproject.toml: expected" in problems(project)[0]
    edit(project.ptx_path, lambda r: r["build"]["sources"].update(other), sign=True)
    assert problems(project) == []


def test_kernels_of_a_later_family_have_no_earlier_ptx(project: Project) -> None:
    own = [
        {"direction": "fwd", "dtype": "bf16", "head_dim": 64, "family": f"sm{n}"} for n in (80, 90)
    ]
    wheel = read_candidate(project.wheel, project.root, project.policy)
    wheel = replace(wheel, manifest={**wheel.manifest, "instances": own})
    text = json.loads(project.ptx_manifest.read_text())
    report = read_report(project.ptx_path, project.root)
    for instances, expected in ((own[:1], 0), (own, 1), ([], 1)):
        text["instances"] = instances
        assert len(list(ptx.manifest_problems(text, report, wheel, "compute_80"))) == expected


def test_the_report_in_this_tree_stands_in() -> None:
    """While it is of the present kernels; the gate refuses it where it is not."""
    path = ROOT / ENTRY.ptx_report
    said = "The gate is shut" in (ROOT / "docs" / "releasing.md").read_text()
    assert said == (not path.exists())
    stated = (
        json.loads(path.with_suffix(".manifest.json").read_text())["sources"] if not said else {}
    )
    if any(stated.get(part) != sha256 for part, sha256 in sources.digests().items()):
        pytest.skip("the report is of other kernels; docs/releasing.md says how it is made again")
    report = read_report(path, ROOT)
    assert list(run_problems(report)) == []
    assert ENTRY.ptx in report.names("ran_as_ptx")
