"""The static index: pip installs from it, and nothing without its proof gets into it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import package_server
import pytest
import release_samples
from flash_attn_build import files
from flash_attn_build.compile import manifest
from flash_attn_build.errors import RefusedError, StepError
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import index
from flash_attn_build.release.report import digest
from release_samples import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    return release_samples.make(folder / "project", release_samples.wheel(folder))


@pytest.fixture
def pages(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of one release page, as the gate writes them."""
    monkeypatch.setattr(release, "POLICY", release_samples.POLICY)
    release.release(project.dist, project.dist, tmp_path / "release", None, project.root)
    shutil.copytree(tmp_path / "release" / "assets", tmp_path / "pages" / "v0.1.0")
    return tmp_path / "pages"


def write(pages: Path, out: Path, *options: str) -> int:
    arguments = ["--pages", str(pages), "--out", str(out), *(options or ["--unattested"])]
    return index.main(arguments)


def the_wheel(pages: Path) -> Path:
    (wheel,) = pages.rglob("*.whl")
    return wheel


def test_pip_installs_from_it(project: Project, pages: Path, tmp_path: Path) -> None:
    assert write(pages, tmp_path / "index") == 0
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    command += ["--directory", str(tmp_path / "index")]
    python = package_server.clean_environment(tmp_path / "environment")
    with package_server.serve(command, tmp_path / "log") as address:
        package_server.pip_install(python, f"{address}simple/", "flash-attn-deterministic")
    log = (tmp_path / "log").read_text()
    # Metadata first (PEP 658), then the wheel.
    assert f"GET /packages/{project.wheel.name}.metadata" in log
    assert f"GET /packages/{project.wheel.name} " in log
    assert list((tmp_path / "environment").rglob("flash_attn_deterministic/_C.so"))


def test_a_page_names_hash_and_python(project: Project, pages: Path, tmp_path: Path) -> None:
    write(pages, tmp_path / "index")
    page = (tmp_path / "index/simple/flash-attn-deterministic/index.html").read_text()
    sha256 = hashlib.sha256(project.wheel.read_bytes()).hexdigest()
    assert f"../../packages/{project.wheel.name}#sha256={sha256}" in page
    metadata = tmp_path / "index" / "packages" / f"{project.wheel.name}.metadata"
    with zipfile.ZipFile(project.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        assert metadata.read_bytes() == wheel.read(name)
    sha256 = hashlib.sha256(metadata.read_bytes()).hexdigest()
    assert f'data-core-metadata="sha256={sha256}"' in page


def test_writing_twice_gives_the_same_files(pages: Path, tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        paths = sorted(path for path in (tmp_path / "index").rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in paths}

    write(pages, tmp_path / "index")
    first = contents()
    write(pages, tmp_path / "index")
    assert contents() == first
    assert [path.name for path in tmp_path.glob(".*")] == []


def edit_report(pages: Path, **changes: Any) -> None:
    (path,) = pages.rglob("*.verification-1.json")
    content = {**json.loads(path.read_text()), **changes}
    content["digest"] = changes.get("digest", digest(content))
    files.write_json(path, content)


def other_bytes(pages: Path) -> None:
    with the_wheel(pages).open("ab") as file:
        file.write(b"\0")


def not_ours(pages: Path) -> None:
    """Somebody's wheel under our name, with a manifest and a report made for it."""
    wheel = the_wheel(pages)
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents["flash_attn_deterministic/evil.so"] = b""
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    release_samples.describe(wheel)
    (report,) = pages.rglob("*.verification-1.json")
    release_samples.write_report(wheel, report)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(other_bytes, "manifest: is of another wheel", id="other bytes"),
        pytest.param(not_ours, "evil.so does not belong into the wheel", id="not ours"),
        pytest.param(
            lambda p: manifest.path_of(the_wheel(p)).unlink(), "manifest.json is missing", id="none"
        ),
        pytest.param(
            lambda p: next(p.rglob("*.verification-1.json")).unlink(),
            "sm_90: no complete, passing report",
            id="no report",
        ),
        pytest.param(lambda p: edit_report(p, quick=True), "is of a quick run", id="quick"),
        pytest.param(lambda p: edit_report(p, status="failed"), "'failed', not 'passed'", id="bad"),
        pytest.param(lambda p: edit_report(p, digest="0" * 64), "was changed after", id="edited"),
        pytest.param(
            lambda p: (
                the_wheel(p).with_name(f"{the_wheel(p).name}.verification-2.json").write_text("{")
            ),
            "is unreadable",
            id="second report cut off",
        ),
        pytest.param(
            lambda p: the_wheel(p).unlink(), "its release page holds no wheel", id="empty"
        ),
        pytest.param(
            lambda p: shutil.copytree(p / "v0.1.0", p / "v0.2.0"), "two release pages", id="twice"
        ),
        pytest.param(lambda p: shutil.rmtree(p / "v0.1.0"), "would be empty", id="nothing"),
    ],
)
def test_what_lacks_its_proof_is_refused(
    pages: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(pages, tmp_path / "index")
    before = sorted((tmp_path / "index").rglob("*"))
    damage(pages)
    assert write(pages, tmp_path / "index") == RefusedError.exit_code
    assert expected in capsys.readouterr().err
    assert sorted((tmp_path / "index").rglob("*")) == before


def later(pages: Path) -> None:
    """Puts the page of a later release beside the first."""
    first = the_wheel(pages)
    wheel = pages / "v0.2.0" / first.name.replace("0.1.0", "0.2.0")
    wheel.parent.mkdir()
    with zipfile.ZipFile(first) as old, zipfile.ZipFile(wheel, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("METADATA"):
                data = data.replace(b"0.1.0", b"0.2.0")
            new.writestr(name.replace("0.1.0.dist-info", "0.2.0.dist-info"), data)
    release_samples.describe(wheel)
    release_samples.write_report(wheel, wheel.with_name(f"{wheel.name}.verification-1.json"))


def test_what_is_demanded_since_a_release_does_not_undo_it(pages: Path, tmp_path: Path) -> None:
    (path,) = pages.rglob("*.verification-1.json")
    sections = json.loads(path.read_text())["sections"]
    (contract,) = (each for each in sections if each["id"] == "contract")
    contract["data"]["checks"].pop()
    edit_report(pages, sections=sections)
    assert write(pages, tmp_path / "index") == RefusedError.exit_code  # it is the newest
    later(pages)
    assert write(pages, tmp_path / "index") == 0
    assert len(list((tmp_path / "index" / "packages").glob("*.whl"))) == 2
    contract["data"]["checks"][0]["status"] = "failed"
    first = next(each for each in pages.rglob("*.verification-1.json") if "0.1.0" in each.name)
    content = {**json.loads(first.read_text()), "sections": sections}
    files.write_json(first, {**content, "digest": digest(content)})
    assert write(pages, tmp_path / "index") == RefusedError.exit_code


def test_an_earlier_release_still_needs_a_proof(
    pages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(pages.rglob("*.verification-1.json")).unlink()
    later(pages)
    assert write(pages, tmp_path / "index") == RefusedError.exit_code
    assert "sm_90: no complete, passing report" in capsys.readouterr().err


def gh(folder: Path, program: str) -> Path:
    """Puts a `gh` of ours on PATH, which notes how it was called."""
    path = folder / "bin" / "gh"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{program}\n')
    path.chmod(0o755)
    return folder / "calls"


def test_every_wheel_and_manifest_needs_an_attestation(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = gh(tmp_path, 'case "$3" in *.json) exit 1;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert write(pages, tmp_path / "index", "--repository", "o/n") == RefusedError.exit_code
    error = capsys.readouterr().err
    assert "manifest.json: has no attestation of this project's build" in error
    first, second = calls.read_text().splitlines()
    for call, suffix in ((first, ".whl"), (second, ".manifest.json")):
        words = call.split()
        assert words[:2] == ["attestation", "verify"]
        assert words[2].endswith(suffix)
        assert "--repo o/n --signer-workflow o/n/.github/workflows/release.yml" in call
        assert "--deny-self-hosted-runners" in call
    assert not (tmp_path / "index").exists()


def test_attestations_are_not_left_out_by_mistake(
    pages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        index.main(["--pages", str(pages), "--out", str(tmp_path / "index")])
    assert "--repository --unattested is required" in capsys.readouterr().err


def test_an_empty_repository_does_not_leave_attestations_out(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a workflow's variable is not set."""
    calls = gh(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert write(pages, tmp_path / "index", "--repository", "") == RefusedError.exit_code
    assert "attestation verify" in calls.read_text()


def test_pages_come_from_all_releases(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.dumps([{"tagName": "v0.1.0"}])
    program = f"""case "$2" in
      list) echo '{listed}';;
      download) mkdir -p "$5" && cp {pages}/v0.1.0/* "$5";;
    esac"""
    calls = gh(tmp_path, program)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert index.main(["--out", str(tmp_path / "index"), "--repository", "o/n"]) == 0
    assert [line.split()[0] for line in calls.read_text().splitlines()] == [
        "release", "release", "attestation", "attestation"
    ]  # fmt: skip
    assert (tmp_path / "index" / "simple" / "flash-attn-deterministic" / "index.html").exists()


def test_without_gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StepError, match="gh, GitHub's command line tool, is not on PATH"):
        index.download_pages(tmp_path)
