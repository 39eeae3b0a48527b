"""The static index: what pip reads, and what is not let into it."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import package_server
import pytest
import release_samples
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.files import write_text
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import index
from release_samples import Project


@pytest.fixture
def pages(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of one release page, as the gate writes them."""
    monkeypatch.setattr(release, "POLICY", release_samples.POLICY)
    release.release(project.dist, project.dist, tmp_path / "release", None, project.root)
    shutil.copytree(tmp_path / "release" / "assets", tmp_path / "pages" / "v0.1.0")
    return tmp_path / "pages"


def write(pages: Path, *options: str) -> int:
    out = pages.parent / "index"
    return index.main(["--pages", str(pages), "--out", str(out), *(options or ["--unattested"])])


def the_wheel(pages: Path) -> Path:
    (wheel,) = pages.rglob("*.whl")
    return wheel


def contents(index: Path) -> dict[str, bytes]:
    paths = sorted(path for path in index.rglob("*") if path.is_file())
    return {path.relative_to(index).as_posix(): path.read_bytes() for path in paths}


PROJECT = "simple/flash-attn-deterministic"


def test_pages_name_hashes_and_are_the_same_a_second_time(pages: Path, tmp_path: Path) -> None:
    write(pages)
    first = contents(tmp_path / "index")
    wheel = the_wheel(pages)
    metadata = first[f"packages/{wheel.name}.metadata"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert metadata == archive.read(name)
    listed = json.loads(first[f"{PROJECT}/index.json"])
    assert listed["versions"] == ["0.1.0"]
    (file,) = listed["files"]
    assert file == {
        "filename": wheel.name,
        "url": f"../../packages/{wheel.name}",
        "hashes": {"sha256": sha256(wheel.read_bytes())},
        "core-metadata": {"sha256": sha256(metadata)},
        "size": wheel.stat().st_size,
        "requires-python": ">=3.10",
    }
    page = first[f"{PROJECT}/index.html"].decode()
    assert f'href="{file["url"]}#sha256={file["hashes"]["sha256"]}"' in page
    assert f'data-core-metadata="sha256={sha256(metadata)}"' in page
    assert 'data-requires-python="&gt;=3.10"' in page
    write(pages)
    assert contents(tmp_path / "index") == first
    assert list(tmp_path.glob(".*")) == []


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def foreign(pages: Path) -> None:
    wheel = the_wheel(pages)
    wheel.rename(wheel.with_name("torch-2.13.0-py3-none-any.whl"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "not ours": (foreign, "expected a wheel of flash-attn-deterministic, got one of torch"),
    "no wheel": (lambda p: the_wheel(p).unlink(), "its release page holds no wheel"),
    "twice": (lambda p: shutil.copytree(p / "v0.1.0", p / "v0.2.0"), "two release pages"),
    "no page": (lambda p: shutil.rmtree(p / "v0.1.0"), "would be empty"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_what_does_not_belong_is_refused(
    pages: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "index" / "kept"
    kept.mkdir(parents=True)
    damage(pages)
    assert write(pages) == RefusedError.exit_code
    assert expected in capsys.readouterr().err
    assert list((tmp_path / "index").iterdir()) == [kept]


def test_a_release_outlives_the_schemas_of_its_time(pages: Path, tmp_path: Path) -> None:
    for path in pages.rglob("*.json"):
        path.write_text('{"schema": 0}')
    assert write(pages) == 0
    assert f"packages/{the_wheel(pages).name}" in contents(tmp_path / "index")


def test_wheels_of_two_machines_share_an_index_and_a_local_version_has_its_own(
    pages: Path, tmp_path: Path
) -> None:
    wheel = the_wheel(pages)
    for name in (
        wheel.name.replace("x86_64", "aarch64"), wheel.name.replace("0.1.0", "0.1.0+cu12")
    ):  # fmt: skip
        shutil.copy(wheel, wheel.with_name(name))
    assert write(pages) == 0
    made = contents(tmp_path / "index")
    for folder, version, count in (("", "0.1.0", 2), ("cu12/", "0.1.0+cu12", 1)):
        listed = json.loads(made[f"{folder}{PROJECT}/index.json"])
        assert (listed["versions"], len(listed["files"])) == ([version], count)
        assert made[f"{folder}{PROJECT}/index.html"].count(b"<a ") == count


@pytest.mark.parametrize("torch", ["2.13.0", "2.9.1"])
def test_torch_is_never_taken_from_the_index(pages: Path, tmp_path: Path, torch: str) -> None:
    """README's command; a torch that will not do is an error, and not looked for elsewhere."""
    write(pages)
    python = package_server.clean_environment(tmp_path / "environment")
    (site,) = (tmp_path / "environment").rglob("site-packages")
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
    write_text(site / f"torch-{torch}.dist-info" / "METADATA", metadata)
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    command += ["--directory", str(tmp_path / "index")]
    fails = torch == "2.9.1"
    with package_server.serve(command, tmp_path / "log") as address:
        said = package_server.pip_install(
            python, f"{address}simple/", "flash-attn-deterministic", fails=fails
        )
    assert ("No matching distribution found for torch>=2.10" in said) == fails
    assert (site / "flash_attn_deterministic" / "_C.so").exists() != fails
    assert ("/simple/torch/" in (tmp_path / "log").read_text()) == fails


def bundle(*names: str) -> dict[str, Any]:
    """What `gh attestation verify --format json` says of files that were attested together."""
    payload = json.dumps({"subject": [{"name": name} for name in names]})
    return {
        "verificationMaterial": {"certificate": {"rawBytes": "Y2VydA=="}, "tlogEntries": [{}]},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload.encode()).decode(),
            "signatures": [{"sig": "c2ln"}],
        },
    }


@pytest.mark.parametrize("alone", [True, False])
def test_an_attestation_is_linked_where_it_is_of_the_wheel_alone(
    pages: Path, tmp_path: Path, gh: Callable[[str], Path], alone: bool
) -> None:
    name = the_wheel(pages).name
    said = [{"attestation": {"bundle": bundle(*([name] if alone else [name, "other"]))}}]
    gh(f"""case "$*" in
      "api repos/o/n/pages "*) echo https://pages.example/n/;;
      *--format*) echo '{json.dumps(said)}';;
    esac""")
    assert write(pages, "--repository", "o/n") == 0
    made = contents(tmp_path / "index")
    (file,) = json.loads(made[f"{PROJECT}/index.json"])["files"]
    assert (f"packages/{name}.provenance" in made) == alone
    if alone:
        assert file["provenance"] == f"https://pages.example/n/packages/{name}.provenance"
        assert f'data-provenance="{file["provenance"]}"'.encode() in made[f"{PROJECT}/index.html"]
        (each,) = json.loads(made[f"packages/{name}.provenance"])["attestation_bundles"]
        assert each["publisher"]["repository"] == "o/n"
        assert each["attestations"][0]["envelope"]["signature"] == "c2ln"


def test_every_wheel_and_manifest_needs_an_attestation(
    pages: Path, gh: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = gh('case "$3" in *.json) exit 1;; esac')
    assert write(pages, "--repository", "o/n") == RefusedError.exit_code
    error = capsys.readouterr().err
    assert "manifest.json: has no attestation of this project's build" in error
    first, second = calls.read_text().splitlines()
    for call, suffix in ((first, ".whl"), (second, ".manifest.json")):
        assert call.startswith("attestation verify ")
        assert call.split()[2].endswith(suffix)
        assert "--repo o/n --signer-workflow o/n/.github/workflows/release.yml" in call
        # A page holds what was built from its tag, not from that of another release.
        assert call.endswith("--deny-self-hosted-runners --source-ref=refs/tags/v0.1.0")
    assert not (pages.parent / "index").exists()


def test_attestations_are_not_left_out_by_mistake(
    pages: Path, gh: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        index.main(["--pages", str(pages)])
    assert "--repository --unattested is required" in capsys.readouterr().err
    calls = gh("exit 1")
    # As where a workflow's variable is not set.
    assert write(pages, "--repository", "") == RefusedError.exit_code
    assert "attestation verify" in calls.read_text()


def test_pages_come_from_all_releases(
    pages: Path, tmp_path: Path, gh: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.dumps([{"tagName": "v0.1.0"}])
    said = json.dumps([{"attestation": {"bundle": bundle()}}])
    calls = gh(f"""case "$*" in
      *" list "*) echo '{listed}';;
      *" download "*) mkdir -p "$5" && cp {pages}/v0.1.0/* "$5";;
      *--format*) echo '{said}';;
    esac""")
    assert index.main(["--out", str(tmp_path / "index"), "--repository", "o/n"]) == 0
    listing, download, *attestations = calls.read_text().splitlines()
    assert "release list --exclude-drafts" in listing
    assert download.startswith("release download v0.1.0")
    assert [call.split()[0] for call in attestations] == ["attestation"] * 3
    assert (tmp_path / "index" / "simple" / "flash-attn-deterministic" / "index.html").exists()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="gh, GitHub's command line tool, is not on PATH"):
        index.download_pages(tmp_path)
