"""A release without tokens: gate, package server, static index, and pip installs from both.

The wheel is a small one of the tests, or the one that FLASH_ATTN_REHEARSAL names (`nox -s
rehearse`), with a report made for it, since there is no GPU here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import package_server
import pytest
import release_samples
from fake_wheel import VERSION
from flash_attn_build.compile import manifest
from flash_attn_build.errors import RefusedError
from flash_attn_build.files import ROOT
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import index
from flash_attn_build.release.policy import POLICY
from release_samples import MODULES, OTHER_WHEEL, TAG, Project, edit

NAME = "flash-attn-deterministic"
WHEEL = f"flash_attn_deterministic-{VERSION}"
REAL = os.environ.get("FLASH_ATTN_REHEARSAL", "")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "build" / "release"


def run(project: Project, out: Path, *options: str) -> int:
    arguments = ["--dist", str(project.dist), "--out", str(out), *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "POLICY", project.policy)
        return release.main(arguments, project.root)


def test_the_whole_way(project: Project, out: Path, tmp_path: Path) -> None:
    assert run(project, out) == 0
    wheel = project.wheel.name
    assert sorted(path.name for path in (out / "assets").iterdir()) == [
        wheel, f"{wheel}.manifest.json", f"{wheel}.verification-1.json"
    ]  # fmt: skip
    notes = (out / "notes.md").read_text()
    assert "- First." in notes
    assert f"| {VERSION}, x86_64, package index | 13.0.88 | sm_90, sm_90a | NVIDIA H200 |" in notes
    assert "- **sm_80**: Machine code for compute capability 8.x" in notes
    assert "g++ (x) 12.2.0" in notes
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True)
    listed = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert listed == there - {"SHA256SUMS"}
    result = json.loads((out.parent / release.RESULT).read_text())
    assert result["result"] == "PASSED"
    assert {"contract", "contract: family", *MODULES} <= set(result["passedTests"])
    assert (result["warnedTests"], result["failedTests"]) == (["sm_80: not verified"], [])
    upload_and_install(out / "package-index" / wheel, tmp_path)
    install_from_index(out, project.wheel, tmp_path)


def upload_and_install(wheel: Path, folder: Path) -> Path:
    """By twine to a package server on loopback, and from there by pip; returns the library."""
    packages, log = folder / "packages", folder / "server.log"
    command = package_server.package_server(packages, log, "-P", ".", "-a", ".")
    python = package_server.clean_environment(folder / "environment")
    environ = {**os.environ, "TWINE_USERNAME": "x", "TWINE_PASSWORD": "y"}
    upload = [sys.executable, "-m", "twine", "upload", "--non-interactive"]
    with package_server.serve(command, log) as address:
        subprocess.run([*upload, "--repository-url", address, str(wheel)], env=environ, check=True)
        package_server.pip_install(python, f"{address}simple/", "--no-deps", NAME)
    (uploaded,) = packages.glob("*.whl")
    assert uploaded.read_bytes() == wheel.read_bytes()
    (library,) = (folder / "environment").rglob("flash_attn_deterministic/_C.so")
    (bill,) = (folder / "environment").rglob("sboms/*.cdx.json")
    assert hashlib.sha256(library.read_bytes()).hexdigest() in bill.read_text()
    return library


def install_from_index(out: Path, wheel: Path, folder: Path) -> None:
    """By pip, from the static index of what the gate wrote."""
    shutil.copytree(out / "assets", folder / "releases" / TAG)
    made = folder / "index"
    arguments = ["--releases", str(folder / "releases"), "--out", str(made), "--unattested"]
    assert index.main(arguments) == 0
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    python = folder / "environment" / "bin" / "python"
    (library,) = (folder / "environment").rglob("flash_attn_deterministic/_C.so")
    library.unlink()
    log = folder / "index.log"
    with package_server.serve([*command, "--directory", str(made)], log) as address:
        package_server.pip_install(
            python, f"{address}simple/", "--no-deps", "--ignore-installed", NAME
        )
    # Metadata first (PEP 658), then the wheel.
    for name in (f"{wheel.name}.metadata", wheel.name):
        assert f'"GET /packages/{name} ' in log.read_text()
    assert library.exists()


def test_what_the_gate_refuses_is_not_written(
    project: Project, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, out) == 0
    edit(project.report_path, lambda r: r.update(quick=True), sign=True)
    assert run(project, out) == RefusedError.exit_code
    assert not out.exists()
    errors = capsys.readouterr().err
    assert "sm_90: no complete, passing report" in errors
    assert "1/verification.json: quick: expected False, got True" in errors
    assert list(out.parent.iterdir()) == []


def test_a_failed_run_is_written_down_to_be_attested(project: Project, out: Path) -> None:
    project.add_report(status="failed")
    assert run(project, out) == RefusedError.exit_code
    result = json.loads((out.parent / release.RESULT).read_text())
    assert (result["result"], result["passedTests"]) == ("FAILED", [])
    assert result["failedTests"] == ["2/verification.json: its status is 'failed'"]
    shutil.rmtree(project.dist / "verification" / "2")
    (project.dist / "verification" / "2").mkdir()  # cut short: it may be run again
    assert run(project, out) == RefusedError.exit_code
    assert list(out.parent.iterdir()) == []


def test_wheels_of_two_machines_are_one_release(
    project: Project, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = release_samples.wheel(tmp_path / "arm", machine="aarch64")
    wheel = Path(shutil.copy(other, project.dist))
    release_samples.describe(wheel)
    release_samples.write_report(wheel, project.dist / "verification" / "2" / "verification.json")
    assert run(project, out) == RefusedError.exit_code
    assert "expected one wheel each of x86_64, found" in capsys.readouterr().err
    machines = dict.fromkeys(("x86_64", "aarch64"), release_samples.CUDA)
    project.policy = replace(project.policy, wheels=machines)
    assert run(project, out) == 0, capsys.readouterr().err
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
    assert run(project, out) == 0
    there = sorted(path.name for path in (out / "assets").iterdir())
    assert [name.partition(".whl")[2] for name in there] == [
        "", ".manifest.json", ".verification-1.json"
    ]  # fmt: skip
    assert "script" not in (out / "notes.md").read_text()


def test_text_of_others_is_shown_as_it_is() -> None:
    assert release._plain("a|b\n<img>`x`[y](z)") == r"a\|b &lt;img&gt;\`x\`\[y\](z)"


@pytest.mark.parametrize("name", ["", f"other-{VERSION}", f"{WHEEL}+cu130"])
def test_the_wheels_must_be_those_of_the_policy(
    project: Project, out: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """None, a foreign one, or one too many beside the right one."""
    if name:
        shutil.copy(project.wheel, project.dist / project.wheel.name.replace(WHEEL, name))
    if "+" not in name:
        project.wheel.unlink()
    assert run(project, out) == RefusedError.exit_code
    errors = capsys.readouterr().err
    foreign = "name: expected flash_attn_deterministic-"
    assert (foreign if "other" in name else "expected one wheel each of x86_64") in errors


def test_attestations_are_asked_for_before_anything_is_read(
    project: Project, out: Path, gh: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    never = 'case "$*" in *predicate-type*) echo no attestations found >&2; exit 1;; esac'
    calls = gh(never)
    attested = ("--attested", "o/n", "c0ffee", TAG)
    assert run(project, out, *attested) == 0
    assert calls.read_text().count(f"--source-digest=c0ffee --source-ref=refs/tags/{TAG}") == 2
    assert run(project, out, *attested[:3], "v9") == RefusedError.exit_code
    assert f"the release is of tag v9, but the wheel is of {TAG}" in capsys.readouterr().err
    project.add_report(wheel=OTHER_WHEEL)
    assert run(project, out) == 0
    assert run(project, out, *attested) == RefusedError.exit_code
    assert "is of no wheel of this release" in capsys.readouterr().err
    gh(never.replace("echo no", "echo HTTP 500; echo not no", 1).replace("found", "there"))
    assert run(project, out, *attested) == RefusedError.exit_code
    gh("exit 1")
    assert run(project, out, *attested) == RefusedError.exit_code
    assert "has no attestation" in capsys.readouterr().err


@pytest.mark.skipif(not REAL, reason="FLASH_ATTN_REHEARSAL names no wheel; `nox -s rehearse` does")
def test_the_real_wheel_takes_the_whole_way(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tree is a clone that is tagged for it; reports are made up, as no GPU is here."""
    built = Path(REAL)
    root = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root)], check=True)
    project = Project(root, tmp_path / "dist", tmp_path / "dist" / built.name, POLICY)
    project.dist.mkdir()
    text = manifest.read(manifest.path_of(built))
    shutil.copy(built, project.wheel)
    shutil.copy(manifest.path_of(built), project.manifest_path)
    release_samples.write_report(project.wheel, project.report_path)
    release_samples.write_ptx_run(project)
    project.tag()
    assert run(project, out) == 0, capsys.readouterr().err
    library = upload_and_install(out / "package-index" / built.name, tmp_path)
    info = json.loads(library.with_name("_build_info.json").read_text())
    assert info["cuda_toolkit"] == text["cuda_toolkit"]
    install_from_index(out, project.wheel, tmp_path)
