"""Unpacking archives and copying folders."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from flash_attn_build.upstream import layout
from flash_attn_build.upstream.errors import SourceError, UnsafeArchiveError
from flash_attn_build.upstream.unpack import copy_folder, folder_version, unpack_archive
from upstream_samples import (
    FILES,
    PREPARED,
    ROOT,
    VERSION,
    make_archive,
    make_folder,
    make_member,
    tree_of,
)

# The licence of CUTLASS is taken later, from a header.
PLACED = PREPARED - {layout.CUTLASS_LICENCE}


def test_archive_and_folder_give_the_same_tree(tmp_path: Path) -> None:
    unpacked, copied = tmp_path / "unpacked", tmp_path / "copied"
    unpacked.mkdir()
    copied.mkdir()
    first = unpack_archive(make_archive(tmp_path / "a.tar.gz"), unpacked)
    second = copy_folder(make_folder(tmp_path / "folder"), copied)
    assert first == second
    assert tree_of(unpacked) == tree_of(copied)
    assert set(tree_of(unpacked)) == PLACED
    assert layout.tree_sha256(unpacked, first) == layout.tree_sha256(copied, second)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        pytest.param("/etc/passwd", {}, "leaves the folder", id="absolute"),
        pytest.param(f"{ROOT}/../../x", {}, "leaves the folder", id="parent"),
        pytest.param(
            f"{ROOT}/csrc/flash_attn/src/../../../../../x.h", {}, "leaves the folder", id="deep"
        ),
        pytest.param(
            f"{ROOT}/csrc/flash_attn/src/l.h",
            {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
            "is a link or a device",
            id="symbolic-link",
        ),
        pytest.param(
            f"{ROOT}/csrc/flash_attn/src/l.h",
            {"type": tarfile.LNKTYPE, "linkname": f"{ROOT}/LICENSE"},
            "is a link or a device",
            id="hard-link",
        ),
        pytest.param(f"{ROOT}/fifo", {"type": tarfile.FIFOTYPE}, "a device", id="fifo"),
        pytest.param(f"{ROOT}/dev", {"type": tarfile.CHRTYPE}, "a device", id="device"),
        pytest.param(f"{ROOT}/LICENSE", {}, "comes twice", id="twice"),
        pytest.param(f"{ROOT}/./LICENSE", {}, "comes twice", id="twice-in-other-words"),
        pytest.param("other/LICENSE", {}, "another top folder", id="second-root"),
    ],
)
def test_unsafe_member(tmp_path: Path, name: str, fields: dict[str, object], words: str) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", extra=(make_member(name, b"", **fields),))
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(UnsafeArchiveError) as caught:
        unpack_archive(archive, into)
    assert words in str(caught.value)
    assert repr(name) in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar.gz", "into"}
    assert set(tree_of(into)) <= PLACED


def test_only_names_and_bytes_are_taken(tmp_path: Path) -> None:
    name = f"{ROOT}/csrc/flash_attn/src/odd.h"
    member = make_member(name, b"x", mode=0o4777, mtime=1, uid=1234)
    into = tmp_path / "into"
    into.mkdir()
    unpack_archive(make_archive(tmp_path / "a.tar.gz", extra=(member,)), into)
    status = (into / "flash_attn/src/odd.h").stat()
    assert status.st_mode & 0o7111 == 0
    assert status.st_mtime > 1
    assert status.st_uid != 1234


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b\x08\0cut"])
def test_unreadable_archive(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(SourceError, match="not a readable archive"):
        unpack_archive(archive, tmp_path)


def test_truncated_archive(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(SourceError, match="not a readable archive"):
        unpack_archive(archive, tmp_path)


@pytest.mark.parametrize(
    "part", [*layout.FOLDERS, layout.LICENCE], ids=["kernels", "cutlass", "licence"]
)
def test_missing_part_is_named(tmp_path: Path, part: str) -> None:
    files = {name: text for name, text in FILES.items() if not name.startswith(part)}
    (tmp_path / "into").mkdir()
    with pytest.raises(SourceError, match=f"lacks {part}"):
        unpack_archive(make_archive(tmp_path / "a.tar.gz", files), tmp_path / "into")
    with pytest.raises(SourceError, match=f"lacks {part}"):
        copy_folder(make_folder(tmp_path / "folder", files), tmp_path / "into")


def test_tree_hash_sees_names_and_borders(tmp_path: Path) -> None:
    def hash_of(case: str, **texts: str) -> str:
        names = []
        for name, text in texts.items():
            target = tmp_path / case / "flash_attn" / "src" / f"{name}.h"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            names.append(f"csrc/flash_attn/src/{name}.h")
        return layout.tree_sha256(tmp_path / case, names)

    original = hash_of("original", a="12", b="3")
    assert hash_of("same", b="3", a="12") == original
    assert hash_of("moved-byte", a="1", b="23") != original
    assert hash_of("renamed", a="12", c="3") != original
    assert hash_of("changed", a="12", b="4") != original


@pytest.mark.parametrize(
    ("files", "version"),
    [
        pytest.param({"PKG-INFO": "Name: x\nVersion: 1.2\n\nVersion: 3\n"}, "1.2", id="pkg-info"),
        pytest.param({"flash_attn/__init__.py": "__version__ = '1.3'\n"}, "1.3", id="checkout"),
        pytest.param(
            {"PKG-INFO": "Version: 1.2\n", "flash_attn/__init__.py": "__version__ = '1.3'\n"},
            "1.2",
            id="both",
        ),
    ],
)
def test_folder_version(tmp_path: Path, files: dict[str, str], version: str) -> None:
    assert folder_version(make_folder(tmp_path, files)) == version


def test_folder_without_version(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no version in PKG-INFO"):
        folder_version(make_folder(tmp_path, {"flash_attn/__init__.py": "", "x": VERSION}))
