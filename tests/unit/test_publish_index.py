from __future__ import annotations

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
from flash_attn_build import bundles as bundles_of
from flash_attn_build import index
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
        bundles_of.pack(verdict, kit, folder)
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
    # What a pip that knows PEP 658 reads before the wheel.
    metadata = tmp_path / "index" / "cu130" / "packages" / f"{project.wheel.name}.metadata"
    with zipfile.ZipFile(project.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        assert metadata.read_bytes() == wheel.read(name)
    sha256 = hashlib.sha256(metadata.read_bytes()).hexdigest()
    assert f'data-core-metadata="sha256={sha256}"' in page


def test_writing_twice_gives_the_same_files(bundles: Path, tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        paths = sorted(path for path in (tmp_path / "index").rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in paths}

    write(bundles, tmp_path / "index")
    first = contents()
    write(bundles, tmp_path / "index")
    assert contents() == first
    assert [path.name for path in tmp_path.glob(".*")] == []


REPORT = "verification-0/verification.json"


def rewrite(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Changes the members of a bundle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def rewrite_report(path: Path, **changes: Any) -> None:
    def change(members: dict[str, bytes]) -> None:
        report = {**json.loads(members[REPORT]), **changes}
        if "digest" not in changes:
            report["digest"] = digest(report)
        members[REPORT] = json.dumps(report).encode()

    rewrite(path, change)


def without(name: str) -> list[dict[str, Any]]:
    """The sections of a report, less a section or a row of the contract."""
    made = [row for row in release_samples.sections() if row["id"] != name]
    for row in made:
        if "checks" in row["data"]:
            row["data"]["checks"] = [one for one in row["data"]["checks"] if one["id"] != name]
    return made


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"status": "failed"}, "its status is 'failed'", id="failed"),
        pytest.param({"wheel": {"sha256": "0" * 64}}, "is for other bytes", id="other bytes"),
        pytest.param({"wheel": None}, "other bytes (sha256 not named)", id="no wheel"),
        pytest.param({"digest": "0" * 64}, "was changed after it was written", id="tampered"),
        pytest.param({"remark": "fine"}, "Additional properties", id="schema"),
        pytest.param({"schema_version": 2}, "expected schema_version 1", id="version"),
        pytest.param({"complete": False}, "is not complete", id="cut short"),
        pytest.param({"quick": True}, "is of a quick run", id="quick"),
        pytest.param({"device": "cpu"}, "ran on 'cpu', not on a GPU", id="CPU"),
        pytest.param({"source_tree": True}, "against the source tree", id="source tree"),
        pytest.param({"sections": without("decode")}, "section decode is missing", id="section"),
        pytest.param({"sections": without("dropout")}, "contract, dropout: missing", id="row"),
        pytest.param({"pins": {}}, "its upstream is not that of the manifest", id="pin"),
        pytest.param(
            {"architectures": {"ran": [], "ran_as_ptx": [], "unverified": []}},
            "sm_90: no report",
            id="architecture",
        ),
    ],
)
def test_a_bundle_without_proof_keeps_the_old_index(
    bundles: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "index"
    write(bundles, out)
    before = (out / "index.html").read_bytes()
    (bundle,) = bundles.glob("*-cu130.zip")
    rewrite_report(bundle, **changes)
    assert write(bundles, out) == RefusedError.exit_code
    said = capsys.readouterr().err
    assert f"{bundle.name}: its wheel (sha256 " in said
    assert expected in said
    assert (out / "index.html").read_bytes() == before
    assert [path.name for path in tmp_path.glob(".*")] == []


def other_wheel(members: dict[str, bytes]) -> None:
    (name,) = (name for name in members if name.endswith(".whl"))
    members[name] += b"\0"


def without_manifest(members: dict[str, bytes]) -> None:
    del members[next(name for name in members if name.endswith(".manifest.json"))]


def deeper_wheel(members: dict[str, bytes]) -> None:
    (name,) = (name for name in members if name.endswith(".whl"))
    members[f"../{name}"] = members.pop(name)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda m: m.pop(REPORT), "sm_90: no report", id="no report"),
        pytest.param(lambda m: m.update({REPORT: b"[]"}), "expected a JSON object", id="list"),
        pytest.param(lambda m: m.update({REPORT: b"{"}), "is unreadable", id="cut off"),
        pytest.param(other_wheel, "the manifest is of another wheel", id="other wheel"),
        pytest.param(without_manifest, "not a bundle of a release", id="no manifest"),
        pytest.param(deeper_wheel, "expected the wheel at the top", id="path"),
        pytest.param(lambda m: m.update({"b.whl": b""}), "not a bundle", id="two wheels"),
    ],
)
def test_a_bundle_of_another_form(
    bundles: Path,
    tmp_path: Path,
    change: Callable[[dict[str, bytes]], object],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (bundle,) = bundles.glob("*-cu130.zip")
    rewrite(bundle, change)
    assert write(bundles, tmp_path / "index") == RefusedError.exit_code
    assert expected in capsys.readouterr().err


def test_a_damaged_bundle(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle,) = bundles.glob("*-cu130.zip")
    bundle.write_bytes(bundle.read_bytes()[:-9])
    assert write(bundles, tmp_path / "index") == RefusedError.exit_code
    assert f"{bundle.name}: not a bundle of a release" in capsys.readouterr().err


def test_a_foreign_file(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundles / "other-cu130.zip").write_text("no archive")
    assert write(bundles, tmp_path / "index") == RefusedError.exit_code
    assert "other-cu130.zip: expected a name of the form" in capsys.readouterr().err


def test_two_bundles_of_one_wheel(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle,) = bundles.glob("*-cu130.zip")
    shutil.copy(bundle, bundle.with_name("flash_attn_deterministic-0.1.0+again-cu130.zip"))
    assert write(bundles, tmp_path / "index") == RefusedError.exit_code
    assert "another bundle of cu130 has" in capsys.readouterr().err


def test_a_toolkit_that_is_no_longer_released_for(bundles: Path, tmp_path: Path) -> None:
    (bundle,) = bundles.glob("*-cu128.zip")
    bundle.rename(bundle.with_name(bundle.name.replace("cu128", "cu118")))
    assert write(bundles, tmp_path / "index") == 0
    assert list((tmp_path / "index" / "cu118" / "packages").glob("*.whl"))


def test_no_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(tmp_path, tmp_path / "index") == RefusedError.exit_code
    assert "the index would be empty" in capsys.readouterr().err


GH = """\
import json, pathlib, shutil, sys, fnmatch
pages = pathlib.Path(__file__).parent / "pages"
command, *rest = sys.argv[2:]
if command == "list":
    print(json.dumps([{"tagName": page.name} for page in sorted(pages.iterdir())]))
    sys.exit()
page = pages / rest[0]
if command == "view":
    print(json.dumps({"assets": [{"name": path.name} for path in page.iterdir()]}))
    sys.exit()
folder = pathlib.Path(rest[rest.index("--dir") + 1])
patterns = [after for word, after in zip(rest, rest[1:]) if word == "--pattern"]
found = [p for p in page.iterdir() if any(fnmatch.fnmatch(p.name, each) for each in patterns)]
if not found:
    sys.exit("no assets match the file pattern")
for path in found:
    shutil.copy(path, folder)
"""


@pytest.fixture
def pages(bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `gh` that answers as the real one does, and what is on its release pages."""
    folder = tmp_path / "bin"
    (folder / "pages" / "v0.1.0").mkdir(parents=True)
    for path in bundles.iterdir():
        shutil.copy(path, folder / "pages" / "v0.1.0")
    script = folder / "gh"
    script.write_text(f"#!{sys.executable}\n{GH}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "pages"


def test_bundles_come_from_every_release_page(pages: Path, tmp_path: Path) -> None:
    assert index.main(["--out", str(tmp_path / "index")]) == 0
    assert len(list((tmp_path / "index").rglob("*.whl"))) == 2


def test_pages_without_bundles_are_passed_over(pages: Path, tmp_path: Path) -> None:
    (pages / "v0.0.1").mkdir()
    (pages / "other").mkdir()
    (pages / "other" / "dataset-cu130.zip").write_text("something else")
    assert index.main(["--out", str(tmp_path / "index")]) == 0
    assert len(list((tmp_path / "index").rglob("*.whl"))) == 2


@pytest.mark.parametrize("answer", ["print('{')", "print('[3]')", "sys.exit(1)"])
def test_a_gh_that_answers_something_else(
    pages: Path, tmp_path: Path, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (pages.parent / "gh").write_text(f"#!{sys.executable}\nimport sys\n{answer}\n")
    assert index.main(["--out", str(tmp_path / "index")]) == UploadError.exit_code
    assert "error: " in capsys.readouterr().err


def test_no_gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UploadError, match="gh, GitHub's command line tool, is not installed"):
        index.download_bundles(tmp_path)
