"""A run of PTX stands in for machine code that no GPU at hand runs, and no other run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import release_samples
from flash_attn_build.release import ptx
from flash_attn_build.release.candidate import read_candidate
from flash_attn_build.release.report import digest, read_report, run_faults
from release_samples import POLICY, Project

ROOT = Path(__file__).resolve().parents[2]
WHERE = "sm_80: docs/results/verification-compute_80"
ENTRIES = [entry for entry in POLICY.unverified_architectures.values() if entry.ptx]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_samples.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def project(wheel: Path, tmp_path: Path) -> Project:
    return release_samples.make(tmp_path / "project", wheel)


def edit(project: Project, **changes: Any) -> None:
    content = {**json.loads(project.ptx_path.read_text()), **changes}
    if "digest" not in changes:
        content["digest"] = digest(content)
    project.ptx_path.write_text(json.dumps(content))
    project.tag()


def rows(name: str, status: str) -> list[dict[str, Any]]:
    """Sections in which one, or one row of the contract, has another status."""
    made = release_samples.sections()
    for section in made:
        for each in [section, *section["data"].get("checks", [])]:
            if each["id"] == name:
                each["status"] = status
    return made


NOTHING_RAN: dict[str, list[str]] = {"ran": [], "ran_as_ptx": [], "unverified": []}
INSTALLED = {"version": "0.1.0", "files": 9, "problems": []}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"complete": False}, "is not complete", id="cut short"),
        pytest.param({"source_tree": True}, "was run against the source tree", id="source tree"),
        pytest.param({"device": "cpu"}, "ran on 'cpu', not on a GPU", id="CPU"),
        pytest.param(
            {"installed": {**INSTALLED, "matches_wheel": False}},
            "the installed files were not those of the wheel",
            id="another installation",
        ),
        pytest.param(
            {"installed": {**INSTALLED, "matches_wheel": None}},
            "the installed files were not those of the wheel",
            id="no wheel named",
        ),
        pytest.param(
            {"architectures": {"ran": [], "ran_as_ptx": [], "unverified": []}},
            "did not run compute_80 as PTX",
            id="other PTX",
        ),
        pytest.param({"sections": []}, "section contract: missing", id="nothing checked"),
        pytest.param(
            {"sections": rows("accuracy", "failed")}, "section accuracy: failed", id="accuracy"
        ),
        pytest.param({"sections": rows("paged", "failed")}, "contract, paged: failed", id="row"),
        pytest.param(
            {"sections": rows("paged", "not-run")}, "contract, paged: not-run", id="row left out"
        ),
        pytest.param({"pins": {}}, "its upstream is not that of the manifest", id="other pin"),
        pytest.param({"digest": "0"}, "was changed after it was written", id="tampered"),
    ],
)
def test_a_report_that_does_not_stand_in(
    project: Project, changes: dict[str, Any], expected: str
) -> None:
    edit(project, **changes)
    assert f"{WHERE}.json: {expected}" in project.reasons()


def test_a_report_that_failed_anywhere_does_not_stand_in(project: Project) -> None:
    edit(project, status="failed", sections=rows("performance", "failed"))
    assert f"{WHERE}.json: its status is 'failed', not 'passed'" in project.reasons()


def test_no_report(project: Project) -> None:
    project.ptx_path.unlink()
    assert f"{WHERE}.json: is unreadable" in project.reasons()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            lambda m: m["wheel"].update(sha256="0" * 64), "is of another wheel", id="other wheel"
        ),
        pytest.param(
            lambda m: m["sources"].update(cpp="0" * 64),
            "built from another tree: cpp",
            id="older kernels",
        ),
        pytest.param(
            lambda m: m["build"].update(defines=["CMAKE_CUDA_FLAGS=-G"]),
            "expected preset 'release' with the option CMAKE_CUDA_ARCHITECTURES=80-virtual alone",
            id="options",
        ),
        pytest.param(
            lambda m: m["build"].update(environment={"CUDAFLAGS": "-G"}),
            "expected preset 'release' with the option CMAKE_CUDA_ARCHITECTURES=80-virtual alone",
            id="environment",
        ),
        pytest.param(lambda m: m["build"].update(preset="dev"), "expected preset", id="dev"),
        pytest.param(lambda m: m["instances"].pop(), "its kernels are not those", id="kernels"),
        pytest.param(
            lambda m: m.update(cuda_toolkit="12.4.131"),
            "cuda_toolkit: '12.4.131', but the wheel to be published has '13.0.88'",
            id="toolkit",
        ),
        pytest.param(lambda m: m.update(deterministic=False), "deterministic: False", id="mode"),
        pytest.param(lambda m: m.update(bits_version=9), "bits_version: 9", id="bits"),
        pytest.param(lambda m: m["upstream"].update(version="9"), "upstream: ", id="upstream"),
        pytest.param(
            lambda m: m.update(architectures=["80-virtual", "90-real"]),
            "expected 80-virtual alone, got 80-virtual, 90-real",
            id="machine code",
        ),
        pytest.param(lambda m: m.update(schema=2), "expected schema 3", id="schema"),
        pytest.param(lambda m: m.pop("sources"), "is not a manifest", id="no sources"),
        pytest.param(lambda m: m.update(build=[]), "is not a manifest", id="other form"),
    ],
)
def test_a_manifest_of_something_else(
    project: Project, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    project.edit(project.ptx_manifest, change)
    project.tag()
    assert f"{WHERE}.manifest.json: {expected}" in project.reasons()


def test_no_manifest(project: Project) -> None:
    project.ptx_manifest.unlink()
    project.tag()
    assert f"{WHERE}.manifest.json: verification-compute_80.manifest.json is missing" in (
        project.reasons()
    )


def test_a_new_version_with_the_same_kernels_needs_no_new_run(project: Project) -> None:
    project.edit(project.ptx_manifest, lambda m: m["sources"].update({"pyproject.toml": "0" * 64}))
    project.tag()
    assert project.reasons() == ""


def test_kernels_of_a_later_family_have_no_earlier_ptx(project: Project) -> None:
    own = [
        {"direction": "fwd", "dtype": "bf16", "head_dim": 64, "family": f"sm{n}"} for n in (80, 90)
    ]
    wheel = read_candidate(project.wheel, project.root)
    wheel = replace(wheel, manifest={**wheel.manifest, "instances": own})
    text = json.loads(project.ptx_manifest.read_text())
    report = read_report(project.ptx_path, release_samples.SCHEMA)
    text["instances"] = own[:1]
    assert list(ptx.manifest_faults(text, report, wheel, "compute_80")) == []
    for instances in (own, []):
        text["instances"] = instances
        (fault,) = ptx.manifest_faults(text, report, wheel, "compute_80")
        assert fault == "its kernels are not those of the wheel to be published"


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.ptx for entry in ENTRIES])
def test_the_report_in_this_tree_stands_in(entry: Any) -> None:
    """That it is of the tree's present kernels is the gate's to say, when something is released."""
    path = ROOT / entry.ptx_report
    if not path.exists():
        pytest.skip(f"{entry.ptx_report} is not made yet: the gate is shut")
    report = read_report(path, release_samples.SCHEMA)
    assert list(run_faults(report)) == []
    assert entry.ptx in report.names("ran_as_ptx")
    assert json.loads(path.with_suffix(".manifest.json").read_text())["sources"]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.ptx for entry in ENTRIES])
def test_the_document_says_whether_the_gate_is_shut(entry: Any) -> None:
    said = "The gate is shut" in (ROOT / "docs" / "releasing.md").read_text()
    assert said == (not (ROOT / entry.ptx_report).exists())
