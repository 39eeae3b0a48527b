"""A release without tokens: gate, release page, upload to a package server, install from it.

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
from pathlib import Path

import package_server
import pytest
import release_samples
from flash_attn_build import files
from flash_attn_build.compile import manifest
from flash_attn_build.errors import RefusedError
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import index
from release_samples import Project

ROOT = Path(__file__).resolve().parents[2]
NAME = "flash-attn-deterministic"
REAL = os.environ.get("FLASH_ATTN_REHEARSAL", "")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(release, "POLICY", release_samples.POLICY)
    wheel = release_samples.wheel(tmp_path / "wheel")
    return release_samples.make(tmp_path / "project", wheel)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "build" / "release"


def run(project: Project, out: Path, *options: str) -> int:
    arguments = ["--dist", str(project.dist), "--out", str(out), *options]
    return release.main(arguments, project.root)


def test_the_whole_way(project: Project, out: Path, tmp_path: Path) -> None:
    assert run(project, out) == 0
    wheel = project.wheel.name
    assert sorted(path.name for path in (out / "assets").iterdir()) == [
        wheel, f"{wheel}.manifest.json", f"{wheel}.verification-1.json"
    ]  # fmt: skip
    notes = (out / "notes.md").read_text()
    assert "- First." in notes
    assert "| 0.1.0, package index | 13.0.88 | sm_90, sm_90a | NVIDIA H200 |" in notes
    assert "- **sm_80**: Machine code for compute capability 8.x" in notes
    assert "g++ (x) 12.2.0" in notes
    check = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True)
    assert check.returncode == 0
    listed = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert listed == there - {"SHA256SUMS"}
    upload_and_install(out / "package-index" / wheel, tmp_path)
    shutil.copytree(out / "assets", tmp_path / "pages" / "v0.1.0")
    made = tmp_path / "index"
    arguments = ["--pages", str(tmp_path / "pages"), "--out", str(made), "--unattested"]
    assert index.main(arguments) == 0
    assert (made / "packages" / wheel).read_bytes() == project.wheel.read_bytes()


def upload_and_install(wheel: Path, folder: Path) -> Path:
    """By twine to a package server on loopback, and from there by pip; returns the library."""
    packages, log = folder / "packages", folder / "server.log"
    command = package_server.package_server(packages, log, "-P", ".", "-a", ".")
    python = package_server.clean_environment(folder / "environment")
    environ = {**os.environ, "TWINE_USERNAME": "x", "TWINE_PASSWORD": "y"}
    upload = [sys.executable, "-m", "twine", "upload", "--non-interactive"]
    with package_server.serve(command, log) as address:
        subprocess.run([*upload, "--repository-url", address, str(wheel)], env=environ, check=True)
        package_server.pip_install(python, f"{address}simple/", NAME)
    (uploaded,) = packages.glob("*.whl")
    assert uploaded.read_bytes() == wheel.read_bytes()
    (library,) = (folder / "environment").rglob("flash_attn_deterministic/_C.so")
    (bill,) = (folder / "environment").rglob("sboms/*.cdx.json")
    assert hashlib.sha256(library.read_bytes()).hexdigest() in bill.read_text()
    return library


def test_what_the_gate_refuses_is_not_written(
    project: Project, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, out) == 0
    project.edit_report(lambda r: r.update(quick=True))
    assert run(project, out) == RefusedError.exit_code
    assert not out.exists()
    errors = capsys.readouterr().err
    assert "sm_90: no complete, passing report" in errors
    assert "1/verification.json: is of a quick run" in errors
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("names", [[], ["other-0.1.0"], ["same", "second+cu130"]])
def test_the_wheels_must_be_those_of_the_policy(
    project: Project, out: Path, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """None, a foreign one, or one too many beside the right one."""
    if "same" not in names:
        kept = project.wheel.rename(project.root / project.wheel.name)
        for name in names:
            shutil.copy(kept, project.dist / f"{name}-py3-none-any.whl")
    else:
        other = project.wheel.name.replace("0.1.0", "0.1.0+cu130")
        shutil.copy(project.wheel, project.dist / other)
    assert run(project, out) == RefusedError.exit_code
    errors = capsys.readouterr().err
    foreign = "name: expected flash_attn_deterministic-"
    assert (foreign if "other-0.1.0" in names else "expected one wheel of each local") in errors


def test_attestations_are_asked_for_before_anything_is_read(
    project: Project, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    calls, gh = tmp_path / "calls", tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    gh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gh.parent}{os.pathsep}{os.environ['PATH']}")
    assert run(project, out, "--attested", "o/n", "c0ffee") == 0
    assert calls.read_text().count("--source-digest c0ffee") == 2
    stray = project.dist / "verification" / "2" / "verification.json"
    wheel = {"filename": project.wheel.name, "sha256": "1" * 64}
    release_samples.write_report(project.wheel, stray, wheel=wheel)
    assert run(project, out) == 0
    assert run(project, out, "--attested", "o/n", "c0ffee") == RefusedError.exit_code
    assert "is of no wheel of this release" in capsys.readouterr().err
    gh.write_text("#!/bin/sh\nexit 1\n")
    assert run(project, out, "--attested", "o/n", "c0ffee") == RefusedError.exit_code
    assert "has no attestation" in capsys.readouterr().err


@pytest.mark.skipif(not REAL, reason="FLASH_ATTN_REHEARSAL names no wheel; `nox -s rehearse` does")
def test_the_real_wheel_takes_the_whole_way(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tree is a clone that is tagged for it; reports are made up, as no GPU is here."""
    built = Path(REAL)
    root = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root)], check=True)
    project = Project(root, tmp_path / "dist", tmp_path / "dist" / built.name)
    project.dist.mkdir()
    shutil.copy(built, project.wheel)
    shutil.copy(manifest.path_of(built), manifest.path_of(project.wheel))
    text = manifest.read(manifest.path_of(project.wheel))
    version = built.name.split("-")[1]
    release_samples.write_report(project.wheel, project.report_path)
    ptx = {**text, "architectures": ["80-virtual"]}
    # As that build leaves out the family that is for 90a alone.
    ptx["instances"] = [each for each in text["instances"] if each.get("family") != "sm90"]
    ptx["build"] = {**text["build"], "defines": release_samples.PTX_DEFINES}
    ptx["wheel"] = {**text["wheel"], "sha256": "80" * 32}
    files.write_json(project.ptx_manifest, ptx)
    stated = {key: ptx[key] for key in release_samples.BUILD}
    release_samples.write_report(
        project.wheel, project.ptx_path, quick=True, build=stated,
        wheel={"filename": built.name, "sha256": "80" * 32},
        architectures={"ran": [], "ran_as_ptx": ["compute_80"], "unverified": []},
    )  # fmt: skip
    project.git("add", "--all")
    project.git("commit", "--quiet", "-m", "stand-in reports")
    project.git("tag", "--force", f"v{version}")
    assert run(project, out) == 0, capsys.readouterr().err
    library = upload_and_install(out / "package-index" / built.name, tmp_path)
    info = json.loads(library.with_name("_build_info.json").read_text())
    assert info["cuda_toolkit"] == text["cuda_toolkit"]
