"""A wheel that cannot be read is refused with a reason, whatever the readers of it throw."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import release_samples
from flash_attn_build.release.candidate import read_candidate
from flash_attn_build.wheel import check
from release_samples import Project


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("intact")
    return release_samples.make(folder / "project", release_samples.wheel(folder / "wheel"))


@pytest.fixture
def project(intact: Project, tmp_path: Path) -> Project:
    shutil.copytree(intact.root, tmp_path / "project")
    dist = tmp_path / "project" / "dist"
    return Project(tmp_path / "project", dist, dist / intact.wheel.name)


def member(wheel: Path, name: str) -> tuple[int, int, int]:
    """Where a member's local header, its data and its entry in the directory begin."""
    with zipfile.ZipFile(wheel) as archive:
        item = archive.getinfo(name)
        assert item.compress_type == zipfile.ZIP_DEFLATED
        directory = archive.start_dir
    data = wheel.read_bytes()
    names, extra = struct.unpack_from("<HH", data, item.header_offset + 26)
    entry = data.index(name.encode(), directory) - 46
    return item.header_offset, item.header_offset + 30 + names + extra, entry


def overwrite(wheel: Path, at: int, data: bytes) -> None:
    with wheel.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("name", [check.LIBRARY, check.BUILD_INFO])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bits", "invalid block type"),  # zlib.error
        ("sum", "BadZipFile"),
        ("encrypted", "RuntimeError"),
        ("method", "NotImplementedError"),
    ],
)
def test_a_damaged_member(project: Project, name: str, kind: str, expected: str) -> None:
    header, data, entry = member(project.wheel, name)
    if kind == "bits":
        overwrite(project.wheel, data, b"\xff" * 8)
    elif kind == "sum":
        overwrite(project.wheel, entry + 16, b"\0\0\0\0")
    elif kind == "encrypted":
        overwrite(project.wheel, header + 6, b"\1\0")
        overwrite(project.wheel, entry + 8, b"\1\0")
    else:
        overwrite(project.wheel, entry + 10, struct.pack("<H", 99))
    found = read_candidate(project.wheel, project.root).faults
    told = [fault for fault in found if fault.startswith("wheel: cannot be read")]
    assert told
    assert expected in told[0]


@pytest.mark.parametrize("kind", [EOFError, LookupError, TypeError, struct.error, OSError])
def test_whatever_a_reader_throws(
    project: Project, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(wheel: Path) -> None:
        raise kind("damaged")

    monkeypatch.setattr(check, "check", fail)
    assert f"wheel: cannot be read ({kind('damaged')!r})" in project.reasons()


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"no archive at all" * 99], ids=["empty", "stub", "text"]
)
def test_a_file_that_is_no_archive(project: Project, data: bytes) -> None:
    project.wheel.write_bytes(data)
    assert "wheel: cannot be read" in project.reasons()


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"instances": 3}', '{"upstream": []}', "null", "[" * 99_999]
)
def test_a_record_of_another_form(tmp_path: Path, text: str) -> None:
    files = {check.BUILD_INFO: text.encode()}
    made = release_samples.wheel(tmp_path / "wheel", files)
    faults = read_candidate(made, tmp_path).faults
    assert [fault for fault in faults if fault.startswith("wheel: ")]


def test_no_damage_ends_in_a_trace(project: Project) -> None:
    whole, draw = project.wheel.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in draw.sample(range(len(whole)), 5):
            damaged[at] ^= 1 << draw.randrange(8)
        project.wheel.write_bytes(damaged[: draw.choice([None, draw.randrange(len(whole))])])
        faults = read_candidate(project.wheel, project.root).faults
        assert any(
            fault.startswith(("manifest: is of another wheel", "wheel: ")) for fault in faults
        )
