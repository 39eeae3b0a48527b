"""A run of PTX stands in for machine code that no GPU at hand runs, and no other run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import release_samples
from flash_attn_build.gate import ptx
from flash_attn_build.gate.candidate import Candidate
from flash_attn_build.gate.report import digest, read_report
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


INSTALLED = {"version": "0.1.0", "files": 9, "problems": []}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"complete": False}, "is not complete", id="cut short"),
        pytest.param({"source_tree": True}, "was run against the source tree", id="source tree"),
        pytest.param({"device": "cpu"}, "ran on 'cpu', not on a GPU", id="CPU"),
        pytest.param(
            {"installed": {**INSTALLED, "matches_wheel": False}},
            "the installed files were not those of a wheel",
            id="another installation",
        ),
        pytest.param(
            {"installed": {**INSTALLED, "matches_wheel": None}},
            "the installed files were not those of a wheel",
            id="no wheel named",
        ),
        pytest.param({"architectures": {}}, "did not run compute_80 as PTX", id="other PTX"),
        pytest.param({"sections": []}, "section contract is missing", id="nothing checked"),
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


def test_how_fast_ptx_is_is_of_no_account(project: Project) -> None:
    edit(project, status="failed", sections=rows("performance", "failed"))
    assert project.reasons() == ""


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
            "built with options of its own: CMAKE_CUDA_FLAGS=-G",
            id="options",
        ),
        pytest.param(
            lambda m: m["build"].update(environment={"CUDAFLAGS": "-G"}),
            "built with options of its own: CUDAFLAGS",
            id="environment",
        ),
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
    assert f"{WHERE}.manifest.json: is unreadable" in project.reasons()


@pytest.mark.parametrize(
    "change",
    [
        # PTX runs by itself where a wheel holds nothing else.
        lambda m: m["build"].update(defines=["CMAKE_CUDA_ARCHITECTURES=80-virtual"]),
        # A new version, with the same kernels, needs no new run.
        lambda m: m["sources"].update({"pyproject.toml": "0" * 64}),
    ],
    ids=["PTX alone", "version"],
)
def test_what_changes_no_kernel_is_allowed(
    project: Project, change: Callable[[dict[str, Any]], object]
) -> None:
    project.edit(project.ptx_manifest, change)
    project.tag()
    assert project.reasons() == ""


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.ptx for entry in ENTRIES])
def test_the_report_in_this_tree_stands_in(entry: Any) -> None:
    """That it is of the tree's present kernels is the gate's to say, when something is released."""
    path = ROOT / entry.ptx_report
    if not path.exists():
        pytest.skip(f"{entry.ptx_report} is not made yet: the gate is shut")
    pin = json.loads((ROOT / "cpp" / "upstream" / "upstream.json").read_text())
    upstream = {**pin, "sha256": pin["sdist"]["sha256"]}
    wheel = Candidate(Path("any.whl"), "", "", {"upstream": upstream})
    report = read_report(path, release_samples.SCHEMA)
    assert list(ptx.report_faults(report, wheel, entry.ptx, POLICY)) == []
    assert json.loads((ROOT / ptx.manifest_path(entry.ptx_report)).read_text())["sources"]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.ptx for entry in ENTRIES])
def test_the_document_says_whether_the_gate_is_shut(entry: Any) -> None:
    said = "The gate is shut" in (ROOT / "docs" / "releasing.md").read_text()
    assert said == (not (ROOT / entry.ptx_report).exists())
