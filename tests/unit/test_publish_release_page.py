from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import release_samples
from flash_attn_build import built, bundles, files, manifest, release_page
from flash_attn_build.errors import RefusedError, SettingError, UploadError
from flash_attn_build.notes import changes, release_notes
from release_samples import Project


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {
        "cu130": release_samples.wheel(folder / "cu130"),
        "cu128": release_samples.wheel(folder / "cu128", cuda_toolkit="12.8.93"),
    }


@pytest.fixture
def project(wheels: dict[str, Path], tmp_path: Path) -> Project:
    """A release of two toolkits, laid out as a CI's downloads are."""
    made = release_samples.make(tmp_path / "project", wheels["cu130"])
    shutil.rmtree(made.dist)
    for label, wheel in wheels.items():
        placed = made.dist / label / wheel.name
        placed.parent.mkdir(parents=True)
        shutil.copy(wheel, placed)
        release_samples.describe(placed)
        report = made.dist / f"verification-{label}" / "verification.json"
        release_samples.write_report(placed, report)
        report.with_suffix(".html").write_text("<p>fine</p>")
    made.wheel = made.dist / "cu130" / wheels["cu130"].name
    return made


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `gh` that keeps what it is given, and fails if asked to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    script = folder / "gh"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {kept}/command\n'
        f'for word in "$@"; do case $word in /*) cp "$word" {kept}/;; esac; done\n'
        'exit "${GH_STATUS:-0}"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return kept


def test_the_page_has_every_wheel_with_its_proof(project: Project, gh: Path) -> None:
    assert release_page.main(["--dist", str(project.dist)], project.root) == 0
    command = (gh / "command").read_text().split()
    assert command[:3] == ["release", "create", "v0.1.0"]
    assert "--verify-tag" in command
    name = project.wheel.name
    packed = [f"flash_attn_deterministic-0.1.0-{label}.zip" for label in ("cu128", "cu130")]
    assert {path.name for path in gh.iterdir()} == {
        "command", "notes.md", name, manifest.file_name(name), *packed,
    }  # fmt: skip
    assert (gh / name).read_bytes() == project.wheel.read_bytes()
    for bundle, label in zip(packed, ("cu128", "cu130"), strict=True):
        with zipfile.ZipFile(gh / bundle) as archive:
            assert archive.read(name) == (project.dist / label / name).read_bytes()
            report = json.loads(archive.read("verification-0/verification.json"))
            assert archive.read("verification-0/verification.html") == b"<p>fine</p>"
            text = json.loads(archive.read(manifest.file_name(name)))
        assert report["wheel"]["sha256"] == text["wheel"]["sha256"]


def test_notes_name_what_was_and_what_was_not_verified(project: Project, gh: Path) -> None:
    release_page.main(["--dist", str(project.dist)], project.root)
    text = (gh / "notes.md").read_text()
    assert text.startswith("- First.\n")
    for version in ("12.8.93", "13.0.88"):
        assert f"| {version} | sm_90 | NVIDIA H200 |" in text
    assert "## Not verified\n\n- **sm_80**: Machine code" in text
    assert text.endswith("The package index has the wheel of CUDA 13.0.\n")


def test_the_same_release_gives_the_same_bundle(project: Project, tmp_path: Path) -> None:
    kit = project.policy.toolkits["13.0"]
    verdict = release_page.judge(project.dist, project.dist, project.policy, project.root)[kit]
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(bundles.pack(verdict, kit, tmp_path / name).read_bytes())
    assert made[0] == made[1]


def test_one_wheel_without_proof_stops_them_all(
    project: Project, gh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project.dist / "verification-cu128")
    assert release_page.main(["--dist", str(project.dist)], project.root) == RefusedError.exit_code
    assert "sm_90: no complete, passing report" in capsys.readouterr().err
    assert list(gh.iterdir()) == []


def test_a_toolkit_without_a_wheel(
    project: Project, gh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project.dist / "cu128")
    assert release_page.main(["--dist", str(project.dist)], project.root) == SettingError.exit_code
    assert "expected one wheel of CUDA 12.8, found 0" in capsys.readouterr().err
    assert list(gh.iterdir()) == []


def test_a_dry_run_makes_no_page(
    project: Project, gh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dist", str(project.dist), "--dry-run"]
    assert release_page.main(arguments, project.root) == 0
    assert list(gh.iterdir()) == []
    said = capsys.readouterr().out
    assert "would run: gh release create v0.1.0 --verify-tag" in said
    assert "## Not verified" in said


def test_the_gate_alone(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--check", "--dist", str(project.dist)]
    assert release_page.main(arguments, project.root) == 0
    assert capsys.readouterr().out.count("the gate is open") == 2
    (project.root / "new").write_text("")
    assert release_page.main(arguments, project.root) == RefusedError.exit_code


@pytest.mark.parametrize("command", [["--check"], []], ids=["gate", "page"])
def test_a_wheel_that_was_not_judged_stops_them_all(
    project: Project, gh: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # No manifest of a known toolkit: none of the release's wheels is missed because of it.
    shutil.copy(project.wheel, project.dist / project.wheel.name)
    arguments = [*command, "--dist", str(project.dist)]
    assert release_page.main(arguments, project.root) == RefusedError.exit_code
    said = capsys.readouterr().err
    assert f"holds wheels of no toolkit of the release: {project.wheel.name}" in said
    assert list(gh.iterdir()) == []


def test_what_is_signed_is_what_was_judged(project: Project, tmp_path: Path) -> None:
    listed = tmp_path / "build" / "checksums.txt"
    arguments = ["--check", "--dist", str(project.dist), "--checksums", str(listed)]
    assert release_page.main(arguments, project.root) == 0
    done = subprocess.run(
        ["sha256sum", "--check", str(listed)], cwd=project.dist, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        f"{label}/{project.wheel.name}: OK" for label in ("cu128", "cu130")
    ]


def test_nothing_is_signed_that_the_gate_refuses(project: Project, tmp_path: Path) -> None:
    shutil.rmtree(project.dist / "verification-cu128")
    listed = tmp_path / "checksums.txt"
    arguments = ["--check", "--dist", str(project.dist), "--checksums", str(listed)]
    assert release_page.main(arguments, project.root) == RefusedError.exit_code
    assert not listed.exists()


@pytest.mark.parametrize("command", [["--check"], []], ids=["gate", "page"])
def test_a_wheel_that_was_replaced_after_the_build(
    project: Project, gh: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.dumps(built.listing(project.dist))
    arguments = [*command, "--dist", str(project.dist), "--built-sha256", told]
    assert release_page.main(arguments, project.root) == 0
    for path in gh.iterdir():
        path.unlink()
    # Whoever rules the GPU runner replaces the wheel, and writes what goes with it.
    with project.wheel.open("ab") as file:
        file.write(b"\0")
    release_samples.describe(project.wheel)
    report = project.dist / "verification-cu130" / "verification.json"
    release_samples.write_report(project.wheel, report)
    assert release_page.main(arguments[:-2], project.root) == 0
    for path in gh.iterdir():
        path.unlink()
    assert release_page.main(arguments, project.root) == RefusedError.exit_code
    assert f"cu130/{project.wheel.name}: has sha256 " in capsys.readouterr().err
    assert list(gh.iterdir()) == []


def test_a_full_disk(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "notes.md")

    monkeypatch.setattr(files, "write_text", fail)
    assert release_page.main(["--dist", str(project.dist)], project.root) == UploadError.exit_code
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err


def test_gh_fails(
    project: Project,
    gh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GH_STATUS", "4")
    assert release_page.main(["--dist", str(project.dist)], project.root) == UploadError.exit_code
    assert "gh did not make the page v0.1.0 (exit status 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.2.0", "- Two."), ("0.1.0", "- One.\n- More."), ("0.1", ""), ("0.3.0", "")],
)
def test_a_versions_part_of_the_changelog(version: str, expected: str) -> None:
    text = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- Two.\n\n## 0.1.0\n\n- One.\n- More.\n"
    assert changes(text, version) == expected


def test_notes_of_a_wheel_that_is_verified_altogether(project: Project) -> None:
    kit = project.policy.toolkits["13.0"]
    verdict = release_page.judge(project.dist, project.dist, project.policy, project.root)[kit]
    whole = type(verdict)(verdict.wheel, (), verdict.verified, {})
    text = release_notes([whole], project.policy, project.root / "CHANGELOG.md")
    assert "Not verified" not in text
