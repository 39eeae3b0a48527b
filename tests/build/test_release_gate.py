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
from flash_attn_build.compile import sources
from flash_attn_build.errors import RefusedError
from flash_attn_build.release import candidate
from flash_attn_build.release.candidate import Candidate, read_candidate
from flash_attn_build.release.gate import find_runs, judge
from flash_attn_build.release.report import digest, read_report, runs_on
from flash_attn_build.release.report import faults as report_faults
from flash_attn_build.release.tree import reasons as tree_reasons
from flash_attn_build.wheel import check as checks
from flash_attn_deterministic.verify import environment
from flash_attn_deterministic.verify.contract.checks import CHECKS
from hypothesis import given, settings
from hypothesis import strategies as st
from release_samples import POLICY, Project

Change = Callable[[dict[str, Any]], object]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_samples.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def project(wheel: Path, tmp_path: Path) -> Project:
    return release_samples.make(tmp_path / "project", wheel)


def section(name: str, status: str) -> Change:
    def change(report: dict[str, Any]) -> None:
        for row in report["sections"]:
            if row["id"] == name:
                row["status"] = status

    return change


def without_section(report: dict[str, Any]) -> None:
    report["sections"] = [row for row in report["sections"] if row["id"] != "decode"]


def check(name: str, status: str) -> Change:
    def change(report: dict[str, Any]) -> None:
        for row in report["sections"]:
            for one in row["data"].get("checks", []):
                if one["id"] == name:
                    one["status"] = status

    return change


def without_checks(report: dict[str, Any]) -> None:
    for row in report["sections"]:
        row["data"] = {}


def test_a_wheel_with_its_proof_passes(project: Project) -> None:
    verdict = project.decide()
    assert verdict.reasons == ()
    assert list(verdict.verified) == ["sm_90", "sm_90a"]
    assert list(verdict.unverified) == ["sm_80"]
    assert "no GPU" in verdict.unverified["sm_80"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda r: r.update(complete=False), "is not complete", id="cut short"),
        pytest.param(lambda r: r.update(quick=True), "is of a quick run", id="quick"),
        pytest.param(lambda r: r.update(source_tree=True), "against the source tree", id="source"),
        pytest.param(lambda r: r.update(device="cpu"), "ran on 'cpu', not on a GPU", id="CPU"),
        pytest.param(lambda r: r.update(status="failed"), "its status is 'failed'", id="failed"),
        pytest.param(
            lambda r: r.update(status="incomplete"), "its status is 'incomplete'", id="incomplete"
        ),
        pytest.param(section("contract", "failed"), "section contract: failed", id="contract"),
        pytest.param(section("decode", "skipped"), "section decode: skipped", id="skipped"),
        pytest.param(without_section, "section decode: missing", id="section left out"),
        pytest.param(check("paged", "failed"), "contract, paged: failed", id="a row failed"),
        pytest.param(
            check("schedule", "not-applicable"),
            "contract, schedule: not-applicable",
            id="a row that did not apply",
        ),
        pytest.param(check("dropout", "failed"), "contract, dropout: failed", id="dropout"),
        pytest.param(check("split-size", "error"), "contract, split-size: error", id="split size"),
        pytest.param(without_checks, "contract, run-to-run: missing", id="rows left out"),
        pytest.param(
            lambda r: r["sections"].append({"id": "extra", "status": "failed"}),
            "section extra: failed",
            id="a section that is not required",
        ),
        pytest.param(
            lambda r: r["sections"].append({"id": "contract", "status": "failed"}),
            "section contract: failed",
            id="a section twice",
        ),
        pytest.param(
            lambda r: r["wheel"].update(sha256="0" * 64),
            "is for other bytes (sha256 " + "0" * 64,
            id="other bytes",
        ),
        pytest.param(lambda r: r.update(wheel=None), "other bytes (sha256 not named)", id="none"),
        pytest.param(
            lambda r: r["installed"].update(matches_wheel=False),
            "the installed files were not those of the wheel",
            id="installed",
        ),
        pytest.param(
            lambda r: r["pins"]["upstream"].update(version="2.8.2"),
            "its upstream is not that of the manifest",
            id="upstream",
        ),
        pytest.param(
            lambda r: r["pins"]["patches"][0].update(sha256="0" * 64),
            "its patches are not those of the manifest",
            id="patches",
        ),
        pytest.param(
            lambda r: r.update(schema_version=2), "expected schema_version 1, got 2", id="version"
        ),
        pytest.param(lambda r: r.pop("status"), "'status' is a required property", id="schema"),
        pytest.param(
            lambda r: r["architectures"].update(ran=["sm_80"]),
            "sm_90: no complete, passing report",
            id="missing architecture",
        ),
        pytest.param(
            lambda r: r["architectures"].update(ran=["sm_90"]),
            "sm_90a: no complete, passing report",
            id="missing family",
        ),
        pytest.param(
            lambda r: r["architectures"].update(unverified=[]),
            "sm_80: unverified, but 1/verification.json does not say so",
            id="unverified architecture not named",
        ),
    ],
)
def test_a_report_that_is_no_proof(project: Project, change: Change, expected: str) -> None:
    project.edit_report(change)
    assert expected in project.reasons()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda r: r["environment"].update(gpu="NVIDIA B200"), id="harmless value"),
        pytest.param(section("contract", "passed "), id="space"),
        pytest.param(lambda r: r.update(remark="all fine"), id="new key"),
        pytest.param(lambda r: r.pop("digest"), id="digest taken out"),
    ],
)
def test_a_tampered_report(project: Project, change: Change) -> None:
    project.edit_report(change, sign=False)
    assert "was changed after it was written" in project.reasons()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "is unreadable"), ("[]", "expected a JSON object"), ("{}", "expected schema_version 1")],
    ids=["cut off", "list", "empty"],
)
def test_a_file_that_is_no_report(project: Project, text: str, expected: str) -> None:
    project.report_path.write_text(text)
    assert expected in project.reasons()
    assert "sm_90: no complete, passing report" in project.reasons()


def test_no_report_at_all(project: Project) -> None:
    shutil.rmtree(project.dist / "verification")
    proof = f"no complete, passing report for sha256 {project.decide().wheel.sha256}"
    assert project.decide().reasons == (f"sm_90: {proof}", f"sm_90a: {proof}")


def test_every_reason_is_told_at_once(project: Project) -> None:
    project.edit_report(lambda r: r.update(quick=True, complete=False), sign=False)
    project.git("tag", "--delete", "v0.1.0")
    (project.root / "new").write_text("")
    found = project.reasons()
    for expected in ("changed after", "quick run", "not complete", "no tag", "new"):
        assert expected in found


def test_a_failure_is_not_undone_by_another_report(project: Project) -> None:
    second = project.dist / "second" / "verification.json"
    sections = [{"id": "contract", "status": "failed"}]
    release_samples.write_report(project.wheel, second, status="failed", sections=sections)
    assert "second/verification.json: section contract: failed" in project.reasons()


@pytest.mark.parametrize("state", ["failed", "error"])
def test_a_row_that_the_policy_does_not_name_may_not_fail(project: Project, state: str) -> None:
    named = tuple(name for name in POLICY.required_checks if name != "dropout")
    project.policy = replace(project.policy, required_checks=named)
    assert project.reasons() == ""
    project.edit_report(check("dropout", state))
    assert f"contract, dropout: {state}" in project.reasons()


@pytest.mark.parametrize("state", ["failed", "error"])
def test_a_row_that_failed_is_not_undone_by_another_report(project: Project, state: str) -> None:
    # Cut short: neither the report nor the section says that it failed.
    rows = release_samples.sections()
    check("chunk", state)({"sections": rows})
    second = project.dist / "verification" / "2" / "verification.json"
    changes = {"complete": False, "status": "incomplete", "sections": rows}
    release_samples.write_report(project.wheel, second, **changes)
    assert f"2/verification.json: contract, chunk: {state}" in project.reasons()


def test_a_quick_report_beside_a_full_one_does_no_harm(project: Project) -> None:
    second = project.dist / "second" / "verification.json"
    release_samples.write_report(project.wheel, second, quick=True)
    assert project.reasons() == ""


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(lambda t: t.replace("true", "false", 1), "was changed", id="edited"),
        pytest.param(lambda t: t[: len(t) // 2], "is unreadable", id="truncated"),
        pytest.param(lambda t: "", "is unreadable", id="empty"),
        pytest.param(lambda t: "{}", "expected schema_version 1", id="emptied"),
        pytest.param(
            lambda t: re.sub('"sha256": "[0-9a-f]{8}', '"sha256": "00000000', t, count=1),
            "was changed",
            id="other bytes",
        ),
    ],
)
def test_a_damaged_report_beside_a_passing_one_blocks(
    project: Project, damage: Callable[[str], str], expected: str
) -> None:
    """Nothing tells that it was not of these bytes, and failed."""
    second = project.dist / "verification" / "2" / "verification.json"
    release_samples.write_report(project.wheel, second)
    assert project.reasons() == ""
    second.write_text(damage(second.read_text()))
    assert f"2/verification.json: {expected}" in project.reasons()


@pytest.mark.parametrize(
    "changes",
    [{"complete": False}, {"status": "incomplete"}, {"status": "failed"}, {"device": "cpu"}],
    ids=["cut short", "incomplete", "failed", "CPU"],
)
def test_a_report_that_did_not_pass_blocks(project: Project, changes: dict[str, Any]) -> None:
    second = project.dist / "verification" / "2" / "verification.json"
    release_samples.write_report(project.wheel, second, **changes)
    assert "2/verification.json: " in project.reasons()


def test_a_run_that_left_no_report_blocks(project: Project) -> None:
    (project.dist / "verification" / "2").mkdir()
    assert "2/verification.json: is unreadable" in project.reasons()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            lambda r: r["environment"].update(gpu="NVIDIA A100", compute_capability="8.0"),
            "says that sm_90 ran on a GPU of compute capability 8.0",
            id="A100",
        ),
        pytest.param(
            lambda r: r["environment"].update(gpu="NVIDIA A100"),
            "ran sm_90 on 'NVIDIA A100', which is none of H100",
            id="A100 that says 9.0",
        ),
        pytest.param(
            lambda r: r["environment"].update(compute_capability=None), "capability None", id="none"
        ),
        pytest.param(
            lambda r: r["build"].update(cuda_toolkit="12.4.131"), "build's cuda_toolkit", id="CUDA"
        ),
        pytest.param(
            lambda r: r["build"].update(architectures=["90-real"]), "architectures", id="other"
        ),
        pytest.param(
            lambda r: r["build"].update(deterministic=False), "build's deterministic", id="mode"
        ),
        pytest.param(
            lambda r: r["build"].update(bits_version=9), "build's bits_version", id="bits"
        ),
        pytest.param(
            lambda r: r["architectures"].update(ran=["sm_90", "sm_90a", "sm_90b"]),
            "says that sm_90b ran, which the wheel does not hold",
            id="not held",
        ),
        pytest.param(
            lambda r: r["build"].update(
                missing_kernels=[{"direction": "bwd", "dtype": "bf16", "head_dim": 64}]
            ),
            "says that the wheel lacks kernels",
            id="kernels",
        ),
    ],
)
def test_a_report_that_is_not_of_this_wheel_on_such_a_gpu(
    project: Project, change: Change, expected: str
) -> None:
    project.edit_report(change)
    found = project.reasons()
    assert expected in found
    assert "sm_90: no complete, passing report" in found


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


@pytest.mark.parametrize(
    "hide",
    [
        ["update-index", "--assume-unchanged", "README.md"],
        ["update-index", "--skip-worktree", "README.md"],
        ["config", "core.fsmonitor", "true"],
    ],
    ids=["assume-unchanged", "skip-worktree", "fsmonitor"],
)
def test_a_change_that_git_is_told_not_to_see(project: Project, hide: list[str]) -> None:
    project.git(*hide)
    (project.root / "README.md").write_text("Not verified: sm_80. Really.\n")
    assert "tree: differs from its commit: README.md" in project.reasons()


def test_a_new_file_that_git_is_told_to_ignore(project: Project) -> None:
    (project.root / ".git" / "info" / "exclude").write_text("hidden.py\n")
    (project.root / "hidden.py").write_text("")
    assert "tree: differs from its commit: hidden.py" in project.reasons()


def test_a_new_file_beside_rules_that_ignore_themselves(project: Project) -> None:
    package = project.root / "python" / "flash_attn_deterministic"
    (package / ".gitignore").write_text("*\n")
    (package / "hidden.py").write_text("")
    assert "tree: differs from its commit: python/flash_attn_deterministic" in project.reasons()


def test_a_checkout_that_names_another_folder(project: Project, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    project.git("config", "core.worktree", str(tmp_path / "clean"))
    (project.root / "hidden.py").write_text("")
    assert "tree: differs from its commit: hidden.py" in project.reasons()


def test_a_failed_run_behind_a_link_blocks(project: Project, tmp_path: Path) -> None:
    release_samples.write_report(
        project.wheel, tmp_path / "elsewhere" / "verification.json", status="failed"
    )
    (project.dist / "verification" / "2").symlink_to(tmp_path / "elsewhere")
    assert "its status is 'failed'" in project.reasons()


def test_where_attestations_are_asked_for_no_other_report_may_lie_around(project: Project) -> None:
    second = project.dist / "verification" / "2" / "verification.json"
    wheel = {"filename": project.wheel.name, "sha256": "1" * 64}
    release_samples.write_report(project.wheel, second, status="failed", wheel=wheel)
    arguments = ([project.wheel], find_runs(project.dist), project.policy, project.root)
    assert judge(*arguments)
    with pytest.raises(RefusedError, match=r"2/verification\.json: is of no wheel of this release"):
        judge(*arguments, strays=False)


def test_a_file_that_may_be_run_suddenly(project: Project) -> None:
    project.git("config", "core.fileMode", "false")
    (project.root / "CMakeLists.txt").chmod(0o755)
    assert "tree: differs from its commit: CMakeLists.txt" in project.reasons()


def test_a_wheel_of_another_toolkit_than_the_policy_has(project: Project) -> None:
    project.policy = replace(project.policy, wheels={"": "12.4.131"})
    assert "made with CUDA 13.0.88, but the release policy wants 12.4.131" in project.reasons()


def test_several_families_of_a_kernel_are_one_kernel_of_the_table() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    instances = [
        {"direction": direction, "dtype": dtype, "head_dim": int(head_dim), "family": family}
        for dtype in table["dtypes"]
        for head_dim in table["bwd_tiles"]
        for direction in ("fwd", "bwd")
        for family in ("sm80", "sm90")
    ]
    assert list(candidate.instance_faults({"instances": instances}, ROOT)) == []
    twice = [*instances, instances[0]]
    assert len(list(candidate.instance_faults({"instances": twice}, ROOT))) == 1


def test_reports_of_other_wheels_do_no_harm(project: Project) -> None:
    second = project.dist / "second" / "verification.json"
    wheel = {"filename": project.wheel.name, "sha256": "1" * 64}
    release_samples.write_report(project.wheel, second, status="failed", wheel=wheel)
    assert project.reasons() == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            lambda m: m["wheel"].update(sha256="0" * 64), "is of another wheel", id="other bytes"
        ),
        pytest.param(lambda m: m.update(schema=1), "manifest: expected schema 3", id="schema"),
        pytest.param(
            lambda m: m["upstream"].update(version="9"), "that cpp/upstream/upstream", id="pin"
        ),
        pytest.param(
            lambda m: m["upstream"]["patches"].clear(), "upstream or patches are not", id="patches"
        ),
        pytest.param(lambda m: m["build"].update(preset="dev"), "preset 'dev'", id="preset"),
        pytest.param(
            lambda m: m["build"].update(defines=["A=1"]), "options of its own: A=1", id="options"
        ),
        pytest.param(
            lambda m: m["build"].update(environment={"CXXFLAGS": "-ffast-math"}),
            "environment variables changed how it was compiled: CXXFLAGS",
            id="environment",
        ),
        pytest.param(
            lambda m: m["build"].pop("environment"),
            "not laid out as the build does it (KeyError('environment'))",
            id="no environment",
        ),
        pytest.param(
            lambda m: m.update(sources={"cpp": "0" * 64}),
            "manifest: sources is not what the wheel says",
            id="sources",
        ),
        pytest.param(lambda m: m.update(deterministic=False), "DETERMINISTIC=OFF", id="mode"),
        pytest.param(
            lambda m: m.update(architectures=["90-real"]),
            "manifest: architectures is not what the wheel says",
            id="architectures",
        ),
        pytest.param(lambda m: m.update(wheel=[]), "is of another wheel", id="wheel"),
        pytest.param(
            lambda m: m["build"].update(locked=False), "tools that locks/ does not", id="not locked"
        ),
        pytest.param(
            lambda m: m["tools"].update(ziglang="0.13.0"),
            "built with ziglang 0.13.0, but locks/ has ziglang==0.17.0",
            id="another linker",
        ),
        pytest.param(
            lambda m: m["tools"].update(torch="2.12.0"), "built with torch 2.12.0", id="headers"
        ),
        pytest.param(
            lambda m: m["tools"].pop("nvidia-cuda-nvcc"),
            "built with nvidia-cuda-nvcc None, but locks/ has nvidia-cuda-nvcc==13.0.88",
            id="no nvcc of a package",
        ),
        pytest.param(
            lambda m: m["tools"].update(h11="2"), "built with h11 2, but locks/ has", id="more"
        ),
        pytest.param(
            lambda m: m["tools"].update(python="3.11.9"), "built with h11 None", id="for a Python"
        ),
        pytest.param(
            lambda m: m["tools"].pop("ziglang"), "built with ziglang None", id="no linker"
        ),
        pytest.param(
            lambda m: m["tools"].update(nvcc="12.4.131"),
            "nvcc 12.4.131 made a wheel of CUDA 13.0.88",
            id="another nvcc",
        ),
        pytest.param(
            lambda m: m["translation_units"].pop(),
            "1 CUDA translation units of 2 for 2 kernels",
            id="a unit less",
        ),
        pytest.param(
            lambda m: m.update(bits_version=2), "bits_version is not what the wheel", id="bits"
        ),
        pytest.param(lambda m: m.update(build="x"), "not laid out as the build", id="build"),
        pytest.param(
            lambda m: m.update(architectures=None), "architectures is not what", id="no list"
        ),
    ],
)
def test_a_wrong_manifest(project: Project, change: Change, expected: str) -> None:
    project.edit_manifest(change)
    assert expected in project.reasons()


def test_no_manifest(project: Project) -> None:
    project.wheel.with_name(f"{project.wheel.name}.manifest.json").unlink()
    assert "manifest.json is missing; the build writes it" in project.reasons()


def test_a_single_byte_more(project: Project) -> None:
    with project.wheel.open("ab") as file:
        file.write(b"\0")
    found = project.reasons()
    assert "manifest: is of another wheel" in found
    assert "is for other bytes" in found


def test_a_wheel_that_is_not_ours(project: Project) -> None:
    wrong = project.wheel.with_name("other-1.0-py3-none-any.whl")
    shutil.copy(project.wheel, wrong)
    project.wheel = wrong
    found = project.reasons()
    assert "name: expected flash_attn_deterministic-" in found
    assert "is not tagged v1.0: it has v0.1.0" in found


@pytest.mark.parametrize(
    ("disturb", "expected"),
    [
        pytest.param(
            lambda p: p.git("commit", "--quiet", "--allow-empty", "-m", "later"),
            "is not tagged v0.1.0: it has no tag",
            id="a commit later",
        ),
        pytest.param(
            lambda p: (p.root / "README.md").write_text("sm_80"),
            "differs from its commit: README.md",
            id="edited",
        ),
        pytest.param(
            lambda p: (p.root / "new file").write_text(""), "its commit: new file", id="new file"
        ),
        pytest.param(
            lambda p: shutil.rmtree(p.root / ".git"), "git does not know", id="no checkout"
        ),
    ],
)
def test_a_tree_that_is_not_the_tagged_one(
    project: Project, disturb: Callable[[Project], object], expected: str
) -> None:
    disturb(project)
    assert expected in project.reasons()


def test_an_architecture_that_the_policy_does_not_know(project: Project) -> None:
    project.policy = replace(project.policy, unverified_architectures={})
    assert "sm_80: unverified, and the release policy does not allow" in project.reasons()


def test_a_required_architecture_that_the_wheel_lacks(project: Project) -> None:
    project.policy = replace(
        project.policy, required_architectures={"sm_90": ("H200",), "sm_100": ("B200",)}
    )
    assert "sm_100: the wheel holds no machine code for it" in project.reasons()


def test_an_unverified_architecture_that_the_readme_does_not_name(project: Project) -> None:
    (project.root / "README.md").write_text("All is well.\n")
    assert "sm_80: unverified, but README.md does not name it" in project.reasons()


@pytest.fixture(scope="module")
def still(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Candidate]:
    made = release_samples.make(tmp_path_factory.mktemp("still") / "project", wheel)
    return made, read_candidate(made.wheel, made.root)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


FREE = ("environment", "digest", "started", "seconds", "baseline")  # of a report


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_change_of_what_is_demanded_gets_through(
    still: tuple[Project, Candidate], data: st.DataObject
) -> None:
    """Whoever signs a changed report anew still has to leave what is demanded as it is."""
    project, judged = still
    content = project.report
    demanded = [key for key in content if key not in FREE]
    key = data.draw(st.sampled_from(demanded))
    changed = {**content, key: data.draw(JSON.filter(lambda value: value != content[key]))}
    changed["digest"] = digest(changed)
    path = project.root / "changed.json"
    path.write_text(json.dumps(changed))
    report = read_report(path, release_samples.SCHEMA)
    faults = list(report_faults(report, judged, project.policy))
    said = "sm_90" in report.names("ran") and "sm_80" in report.names("unverified")
    assert faults or not said


def test_no_schema_of_reports(project: Project) -> None:
    (project.root / "docs" / "verification.schema.json").unlink()
    with pytest.raises(
        RefusedError, match=r"schema: docs/verification\.schema\.json is unreadable"
    ):
        project.decide()


@pytest.mark.parametrize("change", ["edited", "new", "gone"])
def test_a_wheel_of_another_tree(project: Project, change: str) -> None:
    package = project.root / "python" / "flash_attn_deterministic"
    if change == "gone":
        (package / "__init__.py").unlink()
    else:
        name = "__init__.py" if change == "edited" else "new.py"
        (package / name).write_text("a = 1\n")
    project.tag()
    name = "new" if change == "new" else "__init__"
    expected = f"wheel: built from another tree: flash_attn_deterministic/{name}.py"
    assert project.decide().reasons == (expected,)


@pytest.mark.parametrize("name", release_samples.NATIVE)
def test_a_wheel_whose_machine_code_is_of_another_tree(project: Project, name: str) -> None:
    # What lay there when the wheel was built, and was put back before the tag, is not in git.
    with (project.root / name).open("a") as file:
        file.write(" ")
    project.tag()
    part = next(part for part in sources.PARTS if name == part or name.startswith(f"{part}/"))
    assert f"wheel: built from another tree: {part}" in project.decide().reasons


def test_a_tree_without_its_native_sources(project: Project) -> None:
    shutil.rmtree(project.root / "cmake")
    project.tag()
    assert "FileNotFoundError" in project.reasons()


def test_a_tree_without_its_pin(project: Project) -> None:
    (project.root / "cpp" / "upstream" / "upstream.json").unlink()
    project.tag()
    assert "tree: cpp/upstream/upstream.json is unreadable" in project.reasons()


@pytest.mark.parametrize(
    ("held", "missing"),
    [
        ([("fwd", 64)], "bwd bf16 64"),
        ([], "bwd bf16 64, fwd bf16 64"),
        ([("fwd", 64), ("bwd", 64), ("bwd", 64)], "none"),
        ([("fwd", 64), ("bwd", 64), ("fwd", 32)], "none"),
    ],
    ids=["no backward", "nothing", "twice", "one more"],
)
def test_a_wheel_with_other_kernels_than_the_tree_has(
    held: list[tuple[str, int]], missing: str, tmp_path: Path
) -> None:
    instances = [{"direction": d, "dtype": "bf16", "head_dim": n} for d, n in held]
    made = release_samples.wheel(tmp_path / "wheel", instances=instances)
    project = release_samples.make(tmp_path / "project", made)
    if not held:
        assert "lists no instance" in project.reasons()
        return
    (reason,) = project.decide().reasons
    assert reason == (
        f"wheel: its kernels are not those of cpp/instances.json: missing are {missing}"
    )


def test_the_real_table_of_kernels_is_understood() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    instances = [
        {"direction": direction, "dtype": dtype, "head_dim": int(head_dim)}
        for dtype in table["dtypes"]
        for head_dim in table["bwd_tiles"]
        for direction in ("fwd", "bwd")
    ]
    assert list(candidate.instance_faults({"instances": instances}, ROOT)) == []
    assert len(list(candidate.instance_faults({"instances": instances[1:]}, ROOT))) == 1


def test_the_policy_demands_what_reports_have() -> None:
    schema = release_samples.SCHEMA
    rows = schema["properties"]["sections"]["prefixItems"]
    assert list(POLICY.required_sections) == [row["properties"]["id"]["const"] for row in rows]
    listed = schema["$defs"]["check"]["properties"]["id"]["enum"]
    assert list(POLICY.required_checks) == listed == [check.id for check in CHECKS]


def test_the_samples_are_reports(project: Project) -> None:
    for path in (project.report_path, project.ptx_path):
        assert read_report(path, release_samples.SCHEMA).faults == ()


def test_a_library_that_is_not_fit(project: Project, tmp_path: Path) -> None:
    import fake_wheel

    contents = fake_wheel.contents(fake_wheel.library(tmp_path / "library", options=[]))
    project.wheel = fake_wheel.pack(project.dist, contents)
    release_samples.describe(project.wheel)
    release_samples.write_report(project.wheel, project.report_path)
    assert f"{checks.LIBRARY}: not stripped" in project.reasons()


def test_the_policy_demands_something_and_contradicts_nothing() -> None:
    assert all((*POLICY.required_architectures.values(), POLICY.required_checks, POLICY.wheels))
    assert not {*POLICY.required_architectures} & {*POLICY.unverified_architectures}
    assert "" in POLICY.wheels


def test_a_run_on_hopper_proves_what_the_policy_demands_of_the_release() -> None:
    """All machine code of the real preset is demanded or let through by name."""
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    (release,) = (each for each in presets if each["name"] == "release")
    held = release["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"].split(";")
    found = environment.architectures(held, "9.0")
    assert set(found["ran"]) == set(POLICY.required_architectures)
    assert set(found["unverified"]) == set(POLICY.unverified_architectures)


def test_tree_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (reason,) = tree_reasons(tmp_path, "0.1.0")
    assert reason.startswith("tree: git does not know what is checked out")
