"""A release without tokens: gate, upload to a package server, static index, pip.

The wheel is a small one of the tests, or the one that FLASH_ATTN_REHEARSAL names (`nox -s
rehearse`), which is also installed as README says, beside the torch of the Python FLASH_ATTN_FRESH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import release_samples
import stand_ins
from fake_wheel import VERSION
from flash_attn_build.compile import manifest
from flash_attn_build.errors import RefusedError
from flash_attn_build.files import ROOT, sha256_of
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import attestations, candidate, gate, index
from flash_attn_build.release.policy import POLICY
from release_samples import MODULES, OTHER_WHEEL, TAG, Project, edit

NAME = "flash-attn-deterministic"
WHEEL = f"flash_attn_deterministic-{VERSION}"
REAL = os.environ.get("FLASH_ATTN_REHEARSAL", "")


NEVER_FAILED = 'case "$*" in *predicate-type*) echo no attestations found >&2; exit 1;; esac'


@pytest.fixture
def out(project: Project) -> Path:
    return project.root / "build" / "to-publish"


def run(project: Project, *attested: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "POLICY", project.policy)
        out = project.root / "build" / "to-publish"
        release.release(project.dist, project.dist, out, attested, project.root)


def refused(project: Project, *attested: str) -> str:
    with pytest.raises(RefusedError) as caught:
        run(project, *attested)
    return str(caught.value)


def test_the_whole_way(project: Project, out: Path, tmp_path: Path) -> None:
    (project.dist / "dev").mkdir()
    shutil.copy(project.wheel, project.dist / "dev")  # is no candidate
    run(project)
    wheel = project.wheel.name
    assert sorted(path.name for path in (out / "assets").iterdir()) == [
        wheel, f"{wheel}.manifest.json", f"{wheel}.verification-1.json"
    ]  # fmt: skip
    notes = (out / "notes.md").read_text()
    assert "- First." in notes
    assert f"| {VERSION}, x86_64, package index | 13.0.88 | sm_90, sm_90a | NVIDIA H200 |" in notes
    assert "- **sm_80**: Machine code for compute capability 8.x" in notes
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True)
    listed = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert listed == there - {"SHA256SUMS"}
    result = json.loads((out.parent / release.RESULT).read_text())
    assert result["result"] == "PASSED"
    assert {"contract", "contract: family", *MODULES} <= set(result["passedTests"])
    assert (result["warnedTests"], result["failedTests"]) == (["sm_80: not verified"], [])
    upload(out / "package-index" / wheel, tmp_path)


def upload(wheel: Path, folder: Path) -> None:
    """By twine to a package server on loopback."""
    packages = folder / "packages"
    environ = {**os.environ, "TWINE_USERNAME": "x", "TWINE_PASSWORD": "y"}
    twine = [sys.executable, "-m", "twine", "upload", "--non-interactive"]
    with stand_ins.uploads(packages) as url:
        subprocess.run([*twine, "--repository-url", url, str(wheel)], env=environ, check=True)
    (uploaded,) = packages.glob("*.whl")
    assert uploaded.read_bytes() == wheel.read_bytes()


def test_what_the_gate_refuses_is_not_written(project: Project, out: Path) -> None:
    run(project)
    edit(project.report_path, lambda r: r.update(quick=True), sign=True)
    errors = refused(project)
    assert not out.exists()
    assert "sm_90: no complete, passing report" in errors
    assert "1/verification.json: quick: expected False, got True" in errors
    assert list(out.parent.iterdir()) == []


def test_bytes_that_change_after_they_were_judged(
    project: Project, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(wheels: list[Path], *others: Any, **options: Any) -> Any:
        found = gate.judge(wheels, *others, **options)
        wheels[0].write_bytes(b"evil")
        return found

    monkeypatch.setattr(release, "judge", judge)
    assert "the bytes of a wheel are no longer those that were judged" in refused(project)
    assert list(out.parent.iterdir()) == []


def test_a_failed_run_is_written_down_to_be_attested(project: Project, out: Path) -> None:
    project.add_report(status="failed")
    refused(project)
    result = json.loads((out.parent / release.RESULT).read_text())
    assert (result["result"], result["passedTests"]) == ("FAILED", [])
    assert result["failedTests"] == ["2/verification.json: its status is 'failed'"]
    shutil.rmtree(project.dist / "verification" / "2")
    (project.dist / "verification" / "2").mkdir()  # cut short: it may be run again
    refused(project)
    assert list(out.parent.iterdir()) == []


def test_a_failure_is_written_down_where_attestations_cannot_be_asked(
    project: Project, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> None:
        raise RefusedError("no network")

    monkeypatch.setattr(attestations, "check_built", unreachable)
    attested = ("o/n", "c0ffee", TAG)
    assert refused(project, *attested) == "no network"
    assert list(out.parent.iterdir()) == []
    project.add_report(status="failed")
    assert refused(project, *attested) == "no network"
    assert json.loads((out.parent / release.RESULT).read_text())["result"] == "FAILED"


def test_a_changelog_that_is_not_closed_is_refused(project: Project, out: Path) -> None:
    changelog = project.root / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("2026-01-02", "unreleased"))
    project.tag()
    assert "CHANGELOG.md: has no part" in refused(project)
    assert not out.exists()


def test_wheels_of_two_machines_are_one_release(
    project: Project, out: Path, tmp_path: Path
) -> None:
    other = release_samples.wheel(tmp_path / "arm", arm=True)
    wheel = Path(shutil.copy(other, project.dist))
    release_samples.describe(wheel)
    release_samples.write_report(wheel, project.dist / "verification" / "2" / "verification.json")
    assert "expected one wheel each of x86_64, found" in refused(project)
    machines = dict.fromkeys(("x86_64", "aarch64"), release_samples.CUDA)
    project.policy = replace(project.policy, wheels=machines)
    run(project)
    names = {wheel.name, project.wheel.name}
    assert {path.name for path in (out / "package-index").iterdir()} == names
    assert {f"{name}.verification-1.json" for name in names} <= {
        path.name for path in (out / "assets").iterdir()
    }
    assert f"| {VERSION}, aarch64, package index | 13.0.88 |" in (out / "notes.md").read_text()


def test_nothing_of_the_gpu_machine_is_published_but_the_report(
    project: Project, out: Path
) -> None:
    folder = project.report_path.parent
    for name in ("verification.sh", "verification.whl", "verification.html", "notes.md"):
        (folder / name).write_text("evil")
    edit(project.report_path, lambda r: r["environment"].update(driver="<script>"), sign=True)
    run(project)
    there = sorted(path.name for path in (out / "assets").iterdir())
    assert [name.partition(".whl")[2] for name in there] == [
        "", ".manifest.json", ".verification-1.json"
    ]  # fmt: skip
    assert "script" not in (out / "notes.md").read_text()


def test_names_of_the_gpu_machine_reach_no_terminal_and_no_log_as_they_are(
    project: Project, out: Path, gh: Callable[[str], Path]
) -> None:
    gh(NEVER_FAILED)
    name = "\x1b[2J\n::set-output name=x::y\n##[error]"
    project.add_report(name, status="failed")
    project.add_report(f"::warning::{name}", wheel=OTHER_WHEEL)
    said = refused(project, "o/n", "c0ffee", TAG).splitlines()
    said += json.loads((out.parent / release.RESULT).read_text())["failedTests"]
    assert any("is of no wheel of this release" in line for line in said)
    for line in said:
        assert line.isprintable()
        assert line.isascii()
        assert not line.strip().startswith("::")
        assert "##[" not in line


@pytest.mark.parametrize("name", ["", f"other-{VERSION}", f"{WHEEL}+cu130"])
def test_the_wheels_must_be_those_of_the_policy(project: Project, name: str) -> None:
    """None, a foreign one, or one too many beside the right one."""
    if name:
        shutil.copy(project.wheel, project.dist / project.wheel.name.replace(WHEEL, name))
    if "+" not in name:
        project.wheel.unlink()
    foreign = "name: expected flash_attn_deterministic-"
    words = foreign if "other" in name else "expected one wheel each of x86_64"
    assert words in refused(project)


def test_attestations_are_asked_for_before_anything_is_read(
    project: Project, gh: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "POLICY", project.policy)
    calls = gh(NEVER_FAILED)
    attested = ("o/n", "c0ffee", TAG)
    assert release.main(["--attested", *attested], project.root) == 0
    assert calls.read_text().count(f"--source-digest=c0ffee --source-ref=refs/tags/{TAG}") == 2
    other = f"the release is of tag v9, but the wheel is of {TAG}"
    assert other in refused(project, "o/n", "c0ffee", "v9")
    project.add_report(wheel=OTHER_WHEEL)
    run(project)
    assert "is of no wheel of this release" in refused(project, *attested)
    gh(NEVER_FAILED.replace("echo no", "echo HTTP 500; echo not no", 1).replace("found", "there"))
    refused(project, *attested)
    gh("exit 1")
    assert "has no attestation" in refused(project, *attested)


FAKED = """\
what stood in for GPU and GitHub:
- for the tag: {tag} of a clone of HEAD
- for the GPU: sections and environment of docs/results/verification.json as a report of this wheel,
  a report of PTX, and a passed test for each module of tests/gpu
- for attestations: none was asked for
- for Pages and the package index: servers on this machine's loopback
"""
FAKED_OF_DEV = """\
- for a release wheel: a dev wheel, whose manifest was edited (preset, locked tools, one run), and
  whose kernels were not compared with cpp/instances.json
"""


@pytest.mark.skipif(not REAL, reason="FLASH_ATTN_REHEARSAL names no wheel; `nox -s rehearse` does")
def test_from_the_tag_to_pip_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, fresh = Path(REAL), Path(os.environ["FLASH_ATTN_FRESH"])
    root = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root)], check=True)
    project = Project(root, root / "dist", root / "dist" / built.name, POLICY)
    out = root / "build" / "to-publish"
    project.dist.mkdir()
    shutil.copy(built, project.wheel)
    shutil.copy(manifest.path_of(built), project.manifest_path)
    faked = FAKED.format(tag=TAG)
    if manifest.read(project.wheel)["build"]["preset"] != "release":
        faked += FAKED_OF_DEV
        edit(project.manifest_path, as_of_a_release)
        monkeypatch.setattr(candidate, "instance_problems", lambda info, root: ())
    recorded = json.loads((ROOT / "docs" / "results" / "verification.json").read_text())
    proof = {key: recorded[key] for key in ("sections", "environment")}
    release_samples.write_report(project.wheel, project.report_path, **proof)
    modules = gate.gpu_test_modules(root, POLICY)
    tests, sha256 = project.report_path.with_name("gpu-tests.xml"), sha256_of(project.wheel)
    release_samples.write_gpu_tests(tests, sha256, modules)
    release_samples.write_ptx_run(project)
    project.tag()
    run(project)
    upload(out / "package-index" / built.name, tmp_path)
    shutil.copytree(out / "assets", tmp_path / "releases" / TAG)
    given = ["--releases", str(tmp_path / "releases"), "--out", str(tmp_path / "index")]
    assert index.main([*given, "--unattested"]) == 0
    with stand_ins.static(tmp_path / "index") as url:
        # README's command: torch is there, and nothing else comes from elsewhere.
        stand_ins.pip_install(fresh, f"{url}/simple/", NAME)
    program = (
        "import torch, flash_attn_deterministic as fa; x = torch.randn(1, 70, 2, 64).half(); "
        "same = torch.equal(fa.flash_attn_func(x, x, x), fa.flash_attn_func(x, x, x)); "
        "print(fa.__version__, same)"
    )
    said = subprocess.check_output([fresh, "-c", program], text=True, cwd=tmp_path)
    assert said.split() == [VERSION, "True"]
    subprocess.run([fresh.with_name(NAME), "info"], check=True, cwd=tmp_path)
    with capsys.disabled():
        print(f"\n{faked}{built.name}: gate, upload, index and `pip install --index-url` passed")


def test_names_of_a_gpu_are_shown_as_they_are() -> None:
    assert release._plain("a|b\n<img>`x`[y](z) __bold__") == (
        "a&#124;b &#60;img&#62;&#96;x&#96;&#91;y&#93;(z) &#95;&#95;bold&#95;&#95;"
    )


def as_of_a_release(text: dict[str, Any]) -> None:
    """Lets a dev wheel's manifest say what a release's does."""
    cuda, units = text["cuda_toolkit"], len(text["translation_units"])
    text["build"] |= {"preset": "release", "locked": True, "compiled_in_this_run": units}
    text["build"]["toolkit_sha256"] = POLICY.toolkits[cuda][0]
    for each in manifest.locked(cuda):
        if each.marker is None or each.marker.evaluate():
            text["tools"].setdefault(each.name, str(each.specifier).removeprefix("=="))
