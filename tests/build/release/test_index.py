"""The static index: nothing without its attestations, or not listed, gets into it."""

from __future__ import annotations

import base64
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import fake_wheel
import pytest
import release_samples
import stand_ins
from fake_wheel import VERSION
from flash_attn_build.errors import RefusedError
from flash_attn_build.files import write_json, write_text
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import index
from release_samples import TAG, Project, results
from stand_ins import sha256, tree_of


def passed(*names: str) -> str:
    """A `gh` that says that all passed, and of each file that it was built together with others."""
    payload = json.dumps({"subject": [{"name": name} for name in names]})
    bundle = {
        "verificationMaterial": {"certificate": {"rawBytes": "Y2VydA=="}, "tlogEntries": [{}]},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload.encode()).decode(),
            "signatures": [{"sig": "c2ln"}],
        },
    }
    return f"""case "$*" in
      *predicate-type*) echo '{results("PASSED")}';;
      "api repos/o/n/pages "*) echo https://pages.example/n/;;
      *--format*) echo '{json.dumps([{"attestation": {"bundle": bundle}}])}';;
    esac"""


@pytest.fixture
def releases(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of one release, as the gate writes them."""
    monkeypatch.setattr(release, "POLICY", release_samples.POLICY)
    release.release(project.dist, project.dist, tmp_path / "release", (), project.root)
    shutil.copytree(tmp_path / "release" / "assets", tmp_path / "releases" / TAG)
    return tmp_path / "releases"


def write(releases: Path, repository: str | None = None) -> None:
    index.write_index(sorted(releases.iterdir()), releases.parent / "index", repository)


def the_wheel(releases: Path) -> Path:
    (wheel,) = releases.rglob("*.whl")
    return wheel


PROJECT = "simple/flash-attn-deterministic"


def test_pages_name_hashes_and_are_the_same_a_second_time(releases: Path, tmp_path: Path) -> None:
    write(releases)
    first = tree_of(tmp_path / "index")
    wheel = the_wheel(releases)
    metadata = first[f"packages/{wheel.name}.metadata"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert metadata == archive.read(name)
    listed = json.loads(first[f"{PROJECT}/index.json"])
    assert listed["versions"] == [VERSION]
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
    write(releases)
    assert tree_of(tmp_path / "index") == first
    assert list(tmp_path.glob(".*")) == []


def in_release(name: str) -> Callable[[Path], object]:
    return lambda releases: (releases / TAG / name).write_text("x")


def renamed(releases: Path) -> None:
    (releases / TAG).rename(releases / "v9.9")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a script": (in_release("install.sh"), "'install.sh' does not belong into the release"),
    "a foreign wheel": (in_release("evil-1-py3-none-any.whl"), "'evil-1-py3-none-any.whl' does"),
    "a report in HTML": (in_release("x.verification-1.html"), "verification-1.html' does not"),
    "a wheel of another version": (
        in_release("flash_attn_deterministic-9.9-py3-none-any.whl"), "9.9-py3-none-any.whl' does"
    ),
    "another tag": (renamed, "does not belong into the release"),
    "other bytes": (lambda r: the_wheel(r).write_bytes(b"x"), "manifest.json is of another wheel"),
    "no manifest": (
        lambda r: next(r.rglob("*.manifest.json")).unlink(), "manifest.json is missing"
    ),
    "no wheel": (lambda r: the_wheel(r).unlink(), f"{TAG}: the release holds no wheel"),
    "no release": (lambda r: shutil.rmtree(r / TAG), "would be empty"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_of_a_release_is_refused(
    releases: Path, tmp_path: Path, damage: Callable[[Path], object], expected: str
) -> None:
    kept = tmp_path / "index" / "kept"
    kept.mkdir(parents=True)
    damage(releases)
    with pytest.raises(RefusedError, match=expected):
        write(releases)
    assert list((tmp_path / "index").iterdir()) == [kept]


def test_what_is_demanded_since_a_release_does_not_undo_it(
    releases: Path, tmp_path: Path, gh: Callable[[str], Path]
) -> None:
    """Neither another form of reports and manifests, nor other checks of wheels."""
    gh(passed())
    old = releases / "v0.0.1"
    old.mkdir()
    files = {**fake_wheel.contents(b"of other rules", version="0.0.1"), "notes.txt": b""}
    wheel = fake_wheel.pack(old, files, version="0.0.1")
    stated = {"schema": 1, "wheel": {"sha256": sha256(wheel.read_bytes())}}
    write_json(old / f"{wheel.name}.manifest.json", stated)
    write_json(old / f"{wheel.name}.verification-1.json", {"schema_version": 0})
    write(releases, "o/n")
    assert len(list((tmp_path / "index" / "packages").glob("*.whl"))) == 2


NONE = 'case "$*" in *predicate-type*) echo "No attestations found" >&2; exit 1;; esac'


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ('case "$3" in *.json) exit 1;; esac', "manifest.json: has no attestation of its build"),
        (NONE, f"has no attestation that it passed verification as {TAG}"),
    ],
    ids=["manifest", "not verified"],
)
def test_every_wheel_needs_its_attestations(
    releases: Path, gh: Callable[[str], Path], program: str, expected: str
) -> None:
    calls = gh(program)
    with pytest.raises(RefusedError, match=expected):
        write(releases, "o/n")
    # A release holds what was built from its tag, not from that of another one.
    assert f"--source-ref=refs/tags/{TAG}" in calls.read_text()
    assert not (releases.parent / "index").exists()


def test_attestations_are_not_left_out_by_mistake(
    releases: Path, gh: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--releases", str(releases), "--out", str(releases.parent / "index")]
    with pytest.raises(SystemExit):
        index.main(given)
    assert "--repository --unattested is required" in capsys.readouterr().err
    calls = gh("exit 1")
    # As where a workflow's variable is not set.
    assert index.main([*given, "--repository", ""]) == 1
    assert "attestation verify" in calls.read_text()


def test_files_come_from_all_releases(
    releases: Path, tmp_path: Path, gh: Callable[[str], Path]
) -> None:
    listed = json.dumps([{"tagName": TAG}])
    calls = gh(f"""case "$2" in
      list) echo '{listed}';;
      download) mkdir -p "$5" && cp {releases}/{TAG}/* "$5";;
    esac
    {passed()}""")
    assert index.main(["--out", str(tmp_path / "index"), "--repository", "o/n"]) == 0
    listing, download, *asked = calls.read_text().splitlines()
    assert "release list --exclude-drafts" in listing
    assert download.startswith(f"release download {TAG}")
    assert [call.split()[:2] for call in asked] == [["attestation", "verify"]] * 5
    signer = "--repo o/n --signer-workflow o/n/.github/workflows/release.yml --deny-self-hosted"
    assert all(signer in call for call in asked)
    assert (tmp_path / "index" / "simple" / "flash-attn-deterministic" / "index.html").exists()


def test_wheels_of_two_machines_share_an_index_and_a_local_version_has_its_own(
    releases: Path, tmp_path: Path
) -> None:
    wheel = the_wheel(releases)
    for name in (
        wheel.name.replace("x86_64", "aarch64"), wheel.name.replace("-py3", "+cu12-py3")
    ):  # fmt: skip
        shutil.copy(wheel, wheel.with_name(name))
        shutil.copy(f"{wheel}.manifest.json", wheel.with_name(f"{name}.manifest.json"))
    write(releases)
    made = tree_of(tmp_path / "index")
    for folder, version, count in (("", VERSION, 2), ("cu12/", f"{VERSION}+cu12", 1)):
        listed = json.loads(made[f"{folder}{PROJECT}/index.json"])
        assert (listed["versions"], len(listed["files"])) == ([version], count)
        assert made[f"{folder}{PROJECT}/index.html"].count(b"<a ") == count


@pytest.mark.parametrize("torch", ["2.13.0", "2.9.1"])
def test_torch_is_never_taken_from_the_index(releases: Path, tmp_path: Path, torch: str) -> None:
    """README's command; a torch that will not do is an error, and not looked for elsewhere."""
    write(releases)
    python = stand_ins.clean_environment(tmp_path / "environment")
    (site,) = (tmp_path / "environment").rglob("site-packages")
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
    write_text(site / f"torch-{torch}.dist-info" / "METADATA", metadata)
    fails, asked = torch == "2.9.1", list[str]()
    with stand_ins.static(tmp_path / "index", asked) as url:
        said = stand_ins.pip_install(
            python, f"{url}/simple/", "flash-attn-deterministic", fails=fails
        )
    assert ("No matching distribution found for torch>=2.10" in said) == fails
    assert (site / "flash_attn_deterministic" / "_C.so").exists() != fails
    assert ("/simple/torch/" in asked) == fails
    # Metadata first (PEP 658), then the wheel.
    wheel = f"/packages/{the_wheel(releases).name}"
    found = [path for path in asked if path.startswith("/packages/")]
    assert found == [f"{wheel}.metadata", *([] if fails else [wheel])]


@pytest.mark.parametrize("alone", [True, False])
def test_an_attestation_is_linked_where_it_is_of_the_wheel_alone(
    releases: Path, tmp_path: Path, gh: Callable[[str], Path], alone: bool
) -> None:
    name = the_wheel(releases).name
    gh(passed(name) if alone else passed(name, "other"))
    write(releases, "o/n")
    made = tree_of(tmp_path / "index")
    (file,) = json.loads(made[f"{PROJECT}/index.json"])["files"]
    assert (f"packages/{name}.provenance" in made) == alone
    if alone:
        assert file["provenance"] == f"https://pages.example/n/packages/{name}.provenance"
        assert f'data-provenance="{file["provenance"]}"'.encode() in made[f"{PROJECT}/index.html"]
        (each,) = json.loads(made[f"packages/{name}.provenance"])["attestation_bundles"]
        assert each["publisher"]["repository"] == "o/n"
        assert each["attestations"][0]["envelope"]["signature"] == "c2ln"
