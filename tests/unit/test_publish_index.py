from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import package_server
import pytest
import release_samples
from flash_attn_build import index, release_page
from flash_attn_build.errors import RefusedError, UploadError
from flash_attn_build.gate.decision import decide
from flash_attn_build.gate.report import digest
from flash_attn_build.gate.tree import read_tree
from release_samples import Project

LABELS = ("cu128", "cu130")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    return release_samples.make(folder / "project", release_samples.wheel(folder))


@pytest.fixture
def bundles(project: Project, tmp_path: Path) -> Path:
    folder = tmp_path / "bundles"
    folder.mkdir()
    tree = read_tree(project.root)
    verdict = decide(project.wheel, [project.report_path], project.policy, tree, project.root)
    assert verdict.reasons == ()
    for kit in project.policy.toolkits.values():
        release_page.bundle(verdict, kit, folder)
    return folder


def write(bundles: Path, out: Path) -> int:
    return index.main(["--bundles", str(bundles), "--out", str(out)])


def test_pip_installs_from_each_folder(project: Project, bundles: Path, tmp_path: Path) -> None:
    assert write(bundles, tmp_path / "index") == 0
    assert "cu128/simple/" in (tmp_path / "index" / "index.html").read_text()
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    command += ["--directory", str(tmp_path / "index")]
    python = package_server.clean_environment(tmp_path / "environment")
    with package_server.serve(command, tmp_path / "log") as address:
        for label in LABELS:
            package_server.pip_install(
                python, f"{address}{label}/simple/", "flash-attn-deterministic"
            )
    log = (tmp_path / "log").read_text()
    for label in LABELS:
        # Metadata first (PEP 658), then the wheel.
        assert f"GET /{label}/packages/{project.wheel.name}.metadata" in log
        assert f"GET /{label}/packages/{project.wheel.name} " in log
    assert list((tmp_path / "environment").rglob("flash_attn_deterministic/_C.so"))


def test_a_page_names_hash_and_python(project: Project, bundles: Path, tmp_path: Path) -> None:
    write(bundles, tmp_path / "index")
    page = (tmp_path / "index/cu130/simple/flash-attn-deterministic/index.html").read_text()
    sha256 = hashlib.sha256(project.wheel.read_bytes()).hexdigest()
    assert f"../../packages/{project.wheel.name}#sha256={sha256}" in page
    assert 'data-core-metadata="sha256=' in page


def test_writing_twice_gives_the_same_files(bundles: Path, tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        paths = sorted(path for path in (tmp_path / "index").rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in paths}

    write(bundles, tmp_path / "index")
    first = contents()
    write(bundles, tmp_path / "index")
    assert contents() == first
    assert [path.name for path in tmp_path.glob(".*")] == []


def rewrite(path: Path, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = "verification-0/verification.json"
    report = {**json.loads(members[name]), **changes}
    if "digest" not in changes:
        report["digest"] = digest(report)
    members[name] = json.dumps(report).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


@pytest.mark.parametrize(
    "changes",
    [{"status": "failed"}, {"wheel": {"sha256": "0" * 64}}, {"digest": "0" * 64}],
    ids=["failed", "other bytes", "tampered"],
)
def test_a_bundle_without_proof_keeps_the_old_index(
    bundles: Path, tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "index"
    write(bundles, out)
    before = (out / "index.html").read_bytes()
    (bundle,) = bundles.glob("*-cu130.zip")
    rewrite(bundle, **changes)
    assert write(bundles, out) == RefusedError.exit_code
    assert f"{bundle.name}: holds no passing report of its wheel" in capsys.readouterr().err
    assert (out / "index.html").read_bytes() == before
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_foreign_file(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundles / "other-cu130.zip").write_text("no archive")
    assert write(bundles, tmp_path / "index") == RefusedError.exit_code
    assert "other-cu130.zip: not a bundle of a release" in capsys.readouterr().err
    (bundles / "other-cu130.zip").rename(bundles / "other-cu99.zip")
    assert write(bundles, tmp_path / "index") == RefusedError.exit_code
    assert "expected a name ending in cu128, cu130" in capsys.readouterr().err


def test_no_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(tmp_path, tmp_path / "index") == RefusedError.exit_code
    assert "the index would be empty" in capsys.readouterr().err


def test_bundles_come_from_every_release_page(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "gh"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$2" = list ]; then echo \'[{"tagName": "v0.1.0"}]\'; exit; fi\n'
        f'[ "$3" = v0.1.0 ] && cp {bundles}/*.zip "$5"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert index.main(["--out", str(tmp_path / "index")]) == 0
    assert len(list((tmp_path / "index").rglob("*.whl"))) == 2


def test_no_gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UploadError, match="gh, GitHub's command line tool, is not installed"):
        index.download_bundles(tmp_path)
