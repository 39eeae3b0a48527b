"""Publishes to a real package server on loopback, by the path that a release takes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import package_server
import pytest
import release_samples
import torch
from flash_attn_build import built, manifest, publish, wheelcheck
from flash_attn_build.errors import RefusedError, SettingError, UploadError
from release_samples import Project

ROOT = Path(__file__).resolve().parents[2]
NAME = "flash-attn-deterministic"
ATTENTION = """
import flash_attn_deterministic as fad, torch
torch.manual_seed(0)
q, k, v = (torch.randn(4, 100, 2, 64, dtype=torch.bfloat16) for _ in range(3))
batch, alone = fad.flash_attn_func(q, k, v), fad.flash_attn_func(q[:1], k[:1], v[:1])
assert torch.equal(batch[:1].view(torch.int16), alone.view(torch.int16))
print(fad.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_samples.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def project(wheel: Path, tmp_path: Path) -> Project:
    return release_samples.make(tmp_path / "project", wheel)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    return tmp_path / "packages"


@pytest.fixture
def server(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    log = tmp_path / "server.log"
    monkeypatch.setenv("TWINE_USERNAME", "someone")
    monkeypatch.setenv("TWINE_PASSWORD", "secret")
    command = package_server.package_server(packages, log, "-P", ".", "-a", ".")
    with package_server.serve(command, log) as address:
        yield address


def run(project: Project, *arguments: str) -> int:
    return publish.main(["--dist", str(project.dist), *arguments], project.root)


def test_the_server_gets_the_bytes_that_were_verified(
    project: Project, server: str, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, "--repository-url", server) == 0
    (uploaded,) = packages.glob("*.whl")
    assert uploaded.read_bytes() == project.wheel.read_bytes()
    assert f"{uploaded.name} is published" in capsys.readouterr().out


def test_pip_installs_what_was_published(project: Project, server: str, tmp_path: Path) -> None:
    assert run(project, "--repository-url", server) == 0
    python = package_server.clean_environment(tmp_path / "environment")
    said = package_server.pip_install(python, f"{server}simple/", NAME)
    assert "Successfully installed flash-attn-deterministic-0.1.0" in said
    (library,) = (tmp_path / "environment").rglob("flash_attn_deterministic/_C.so")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    (bill,) = (tmp_path / "environment").rglob("sboms/*.cdx.json")
    assert digest in bill.read_text()


def test_the_server_may_be_named_in_twines_configuration(
    project: Project, server: str, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    text = f"[distutils]\nindex-servers = local\n[local]\nrepository = {server}\n"
    (home / ".pypirc").write_text(f"{text}username = someone\npassword = secret\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("TWINE_USERNAME")
    monkeypatch.delenv("TWINE_PASSWORD")
    assert run(project, "--repository", "local") == 0
    assert len(list(packages.glob("*.whl"))) == 1


def test_what_the_gate_refuses_never_reaches_the_server(
    project: Project, server: str, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project.edit_report(lambda r: r.update(quick=True))
    assert run(project, "--repository-url", server) == RefusedError.exit_code
    assert list(packages.iterdir()) == []
    errors = capsys.readouterr().err
    assert "sm_90: no complete, passing report" in errors
    assert "1/verification.json: is of a quick run" in errors


def test_a_dry_run_uploads_nothing_and_shows_what_it_would_do(
    project: Project, server: str, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, "--repository-url", server, "--dry-run") == 0
    assert list(packages.iterdir()) == []
    said = capsys.readouterr().out
    command = "twine upload --non-interactive --disable-progress-bar --repository-url"
    assert f"would run: {command} {server} {project.wheel.name}\n" in said
    assert "| 13.0.88 | sm_90 | NVIDIA H200 |" in said
    assert "- **sm_80**: Machine code for compute capability 8.x" in said
    assert "- First." in said


def test_a_dry_run_says_why_it_would_refuse(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.git("tag", "--delete", "v0.1.0")
    assert run(project, "--dry-run") == RefusedError.exit_code
    assert "is not tagged v0.1.0" in capsys.readouterr().err


def test_a_version_is_published_once(
    project: Project, server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(project, "--repository-url", server) == 0
    assert run(project, "--repository-url", server) == UploadError.exit_code
    errors = capfd.readouterr().err
    assert "twine did not upload flash_attn_deterministic-0.1.0" in errors
    assert "raise the version" in errors


def test_a_server_that_does_not_answer(
    project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINE_USERNAME", "someone")
    monkeypatch.setenv("TWINE_PASSWORD", "secret")
    address = "http://127.0.0.1:9/"  # discard: nobody listens there
    assert run(project, "--repository-url", address) == UploadError.exit_code
    assert "twine did not upload" in capfd.readouterr().err


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_wheel_is_meant(
    project: Project, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if count:
        other = project.dist / "cu130" / project.wheel.name
        other.parent.mkdir()
        beside = manifest.file_name(project.wheel.name)
        shutil.copy(project.wheel, other)
        shutil.copy(project.wheel.with_name(beside), other.with_name(beside))
    else:
        project.wheel.unlink()
    assert run(project, "--dry-run") == SettingError.exit_code
    assert f"expected one wheel of CUDA 13.0, found {count}" in capsys.readouterr().err


def test_wheels_of_other_toolkits_stay_where_they_are(project: Project) -> None:
    other = project.dist / "cu128" / project.wheel.name
    other.parent.mkdir()
    shutil.copy(project.wheel, other)
    release_samples.describe(other, cuda_toolkit="12.8.93")
    assert run(project, "--dry-run") == 0


@pytest.mark.parametrize("what", ["wheel", "manifest"])
def test_what_was_replaced_after_the_build_never_reaches_the_server(
    project: Project,
    server: str,
    packages: Path,
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = json.dumps(built.listing(project.dist))
    if what == "wheel":
        with project.wheel.open("ab") as file:
            file.write(b"\0")
        release_samples.describe(project.wheel)
        release_samples.write_report(project.wheel, project.report_path)
    else:
        project.edit_manifest(lambda m: m.update(tools={"cmake": "1"}))
    assert run(project, "--dry-run") == 0
    arguments = ["--repository-url", server, "--built-sha256", told]
    assert run(project, *arguments) == RefusedError.exit_code
    assert "not what was built" in capsys.readouterr().err
    assert list(packages.iterdir()) == []


def test_what_was_built_reaches_the_server(project: Project, server: str, packages: Path) -> None:
    told = json.dumps(built.listing(project.dist))
    assert run(project, "--repository-url", server, "--built-sha256", told) == 0
    assert len(list(packages.glob("*.whl"))) == 1


@pytest.mark.parametrize("told", ["", "{}", "[]", "null", '{"a.whl": "?"}', '{"a.whl": 5}'])
def test_a_comparison_with_nothing_is_none(
    project: Project, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, "--dry-run", "--built-sha256", told) == SettingError.exit_code
    assert "--built-sha256: expected a JSON object of files" in capsys.readouterr().err


@pytest.mark.build
@pytest.mark.slow
def test_the_built_wheel_computes_attention_as_installed_from_the_server(
    server: str, packages: Path, tmp_path: Path
) -> None:
    # A small wheel, which the gate would refuse; what is behind the gate is the same for all.
    publish.upload(Path(os.environ["FLASH_ATTN_WHEEL"]), ("--repository-url", server))
    check_attention(server, tmp_path)


def check_attention(server: str, tmp_path: Path) -> None:
    python = package_server.clean_environment(tmp_path / "environment")
    package_server.pip_install(python, f"{server}simple/", NAME)
    package_server.lend_packages(python)
    where = package_server.run_clean(python, ATTENTION, tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path / "environment")


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch would load the stand-in")
def test_our_python_computes_attention_as_installed_from_the_server(
    server: str, tmp_path: Path
) -> None:
    # A wheel of the sources, whose library is a stand-in: CPU tensors need none of it.
    sources = ROOT / "python"
    tiles = json.loads((ROOT / "cpp" / "instances.json").read_text())["tiles"]
    extra = {
        path.relative_to(sources).as_posix(): path.read_bytes()
        for path in (sources / wheelcheck.PACKAGE).rglob("*.py")
    }
    made = release_samples.wheel(tmp_path / "made", extra, tiles=tiles)
    project = release_samples.make(tmp_path / "project", made)
    assert run(project, "--repository-url", server) == 0
    check_attention(server, tmp_path)
