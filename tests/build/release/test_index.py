"""The static index: nothing without its proof gets into it."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import fake_wheel
import pytest
import release_samples
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import index
from release_samples import Change, Project, edit, sections


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


def the_report(pages: Path) -> Path:
    (path,) = pages.rglob("*0.1.0*.verification-1.json")
    return path


def test_a_page_names_hashes_and_is_the_same_a_second_time(pages: Path, tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        paths = sorted(path for path in (tmp_path / "index").rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / "index")): path.read_bytes() for path in paths}

    write(pages)
    first = contents()
    page = first["simple/flash-attn-deterministic/index.html"].decode()
    wheel = the_wheel(pages)
    assert f"../../packages/{wheel.name}#sha256={sha256(wheel.read_bytes())}" in page
    metadata = first[f"packages/{wheel.name}.metadata"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert metadata == archive.read(name)
    assert f'data-core-metadata="sha256={sha256(metadata)}"' in page
    write(pages)
    assert contents() == first
    assert list(tmp_path.glob(".*")) == []


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def not_ours(pages: Path) -> None:
    """A foreign wheel under our name, with a manifest and a report made for it."""
    wheel = the_wheel(pages)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("flash_attn_deterministic/evil.so", b"")
    release_samples.describe(wheel)
    release_samples.write_report(wheel, the_report(pages))


def cut_off(pages: Path) -> None:
    """A second report that cannot be read."""
    report = the_report(pages)
    report.with_name(report.name.replace("-1.json", "-2.json")).write_text("{")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "not ours": (not_ours, "evil.so does not belong into the wheel"),
    "no report": (lambda p: the_report(p).unlink(), "sm_90: no complete, passing report"),
    "a second report cut off": (cut_off, "is unreadable"),
    "no wheel": (lambda p: the_wheel(p).unlink(), "its release page holds no wheel"),
    "twice": (lambda p: shutil.copytree(p / "v0.1.0", p / "v0.2.0"), "two release pages"),
    "no page": (lambda p: shutil.rmtree(p / "v0.1.0"), "would be empty"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_what_lacks_its_proof_is_refused(
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


def later(pages: Path) -> None:
    """Puts the page of a later release beside the first."""
    first = the_wheel(pages)
    files = {}
    with zipfile.ZipFile(first) as old:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("METADATA"):
                data = data.replace(b"0.1.0", b"0.2.0")
            if not name.endswith("RECORD"):
                files[name.replace("0.1.0.dist-info", "0.2.0.dist-info")] = data
    wheel = fake_wheel.pack(pages / "v0.2.0", files, version="0.2.0")
    release_samples.describe(wheel)
    release_samples.write_report(wheel, wheel.with_name(f"{wheel.name}.verification-1.json"))


def test_what_is_demanded_since_a_release_does_not_undo_it(pages: Path, tmp_path: Path) -> None:
    def without_last_row(**states: str) -> Change:
        rows = sections(**states)
        next(each for each in rows if each["id"] == "contract")["data"]["checks"].pop()
        return lambda report: report.update(sections=rows)

    edit(the_report(pages), without_last_row(), sign=True)
    assert write(pages) == RefusedError.exit_code  # it is the newest
    later(pages)
    assert write(pages) == 0
    assert len(list((tmp_path / "index" / "packages").glob("*.whl"))) == 2
    edit(the_report(pages), without_last_row(batch="failed"), sign=True)
    assert write(pages) == RefusedError.exit_code


def test_an_earlier_release_still_needs_a_proof(
    pages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    the_report(pages).unlink()
    later(pages)
    assert write(pages) == RefusedError.exit_code
    assert "sm_90: no complete, passing report" in capsys.readouterr().err


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
    calls = gh(f"""case "$2" in
      list) echo '{listed}';;
      download) mkdir -p "$5" && cp {pages}/v0.1.0/* "$5";;
    esac""")
    assert index.main(["--out", str(tmp_path / "index"), "--repository", "o/n"]) == 0
    listing, download, *attestations = calls.read_text().splitlines()
    assert "release list --exclude-drafts" in listing
    assert download.startswith("release download v0.1.0")
    assert [call.split()[0] for call in attestations] == ["attestation"] * 2
    assert (tmp_path / "index" / "simple" / "flash-attn-deterministic" / "index.html").exists()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="gh, GitHub's command line tool, is not on PATH"):
        index.download_pages(tmp_path)
