"""Where the sources come from: given, cached or fetched; and what is refused."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from flash_attn_build.errors import DiskError, HashMismatchError, NetworkError, SourceError
from flash_attn_build.upstream import source
from flash_attn_build.upstream.pin import Pin
from flash_attn_build.upstream.prepare import CUTLASS_LICENCE
from flash_attn_build.upstream.source import (
    cache_dir,
    cached_archive,
    placed,
    read_archive,
    read_folder,
    read_sources,
)
from upstream_samples import (
    FILES,
    PREPARED,
    ROOT,
    make_archive,
    make_folder,
    make_member,
    make_pin,
    tree_of,
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return make_archive(tmp_path / "given.tar.gz")


@pytest.fixture
def pin(tmp_path: Path, archive: Path) -> Pin:
    return make_pin(tmp_path / "pin", archive)


class Fetcher:
    """Stands for the network: writes given bytes, and counts how often."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, pin: Pin, out: BinaryIO) -> None:
        self.calls += 1
        out.write(self.content)


def _no_network(*_: object) -> None:
    raise AssertionError("the network was used")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "download", _no_network)
    monkeypatch.setattr(source, "read_pip_settings", _no_network)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("kind", ["archive", "folder"])
def test_given_source_needs_no_network(pin: Pin, archive: Path, tmp_path: Path, kind: str) -> None:
    given = archive if kind == "archive" else make_folder(tmp_path / "folder")
    found = read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(given)})
    assert set(found) == PREPARED - {CUTLASS_LICENCE}


@pytest.mark.usefixtures("offline")
def test_given_relative_path(pin: Pin, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(archive.parent)
    found = read_sources(pin, {"FLASH_ATTENTION_SOURCE": archive.name})
    assert "flash_attn/src/fwd.cu" in found


def test_given_path_does_not_exist(pin: Pin, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(tmp_path / "none")})


def test_given_archive_has_wrong_hash(pin: Pin, archive: Path) -> None:
    archive.write_bytes(b"other")
    with pytest.raises(HashMismatchError, match=f"with sha256 {pin.sha256}, found d9298a10"):
        read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(archive)})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"csrc/flash_attn/src/softmax.h": "changed\n"}, id="changed"),
        pytest.param({"csrc/cutlass/include/cute/more.hpp": ""}, id="added"),
        pytest.param({"LICENSE": "changed\n"}, id="licence"),
    ],
)
def test_given_folder_has_changed_files(pin: Pin, tmp_path: Path, change: dict[str, str]) -> None:
    folder = make_folder(tmp_path / "folder", {**FILES, **change})
    with pytest.raises(SourceError, match=r"were changed, added or removed.*unpack the source"):
        read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(folder)})


@pytest.mark.usefixtures("offline")
def test_files_that_no_build_reads_do_not_matter(pin: Pin, tmp_path: Path) -> None:
    more = {"setup.py": "", "csrc/flash_attn/src/softmax.h.orig": "", "csrc/x/y.h": ""}
    folder = make_folder(tmp_path / "folder", {**FILES, **more})
    found = read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(folder)})
    assert set(found) == PREPARED - {CUTLASS_LICENCE}


def test_cache_is_filled_once(pin: Pin, archive: Path, tmp_path: Path) -> None:
    fetch = Fetcher(archive.read_bytes())
    cache = tmp_path / "a" / "cache"
    first = cached_archive(pin, cache, fetch)
    assert cached_archive(pin, cache, fetch) == first
    assert fetch.calls == 1
    assert tree_of(cache) == {f"{pin.sha256}.tar.gz": archive.read_bytes()}


@pytest.mark.parametrize("damage", [b"", b"damaged"], ids=["empty", "other"])
def test_damaged_entry_is_fetched_again(
    pin: Pin, archive: Path, tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = Fetcher(archive.read_bytes())
    cached_archive(pin, tmp_path / "cache", fetch).write_bytes(damage)
    assert cached_archive(pin, tmp_path / "cache", fetch).read_bytes() == archive.read_bytes()
    assert fetch.calls == 2
    assert "damaged" in capsys.readouterr().err


def test_wrong_bytes_are_not_kept(pin: Pin, tmp_path: Path) -> None:
    with pytest.raises(HashMismatchError):
        cached_archive(pin, tmp_path / "cache", Fetcher(b"other"))
    assert tree_of(tmp_path / "cache") == {}


@pytest.mark.parametrize(
    "failure",
    [NetworkError("x"), KeyboardInterrupt(), SystemExit(143)],
    ids=["network", "interrupt", "terminated"],
)
def test_nothing_half_written_stays(pin: Pin, tmp_path: Path, failure: BaseException) -> None:
    def fetch(pin: Pin, out: BinaryIO) -> None:
        out.write(b"half")
        out.flush()
        raise failure

    with pytest.raises(type(failure)):
        cached_archive(pin, tmp_path / "cache", fetch)
    assert tree_of(tmp_path / "cache") == {}


def test_concurrent_builds_share_a_cache(pin: Pin, archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    with ThreadPoolExecutor(8) as pool:
        runs = [
            pool.submit(cached_archive, pin, tmp_path / "cache", Fetcher(content))
            for _ in range(16)
        ]
    assert {run.result().read_bytes() for run in runs} == {content}
    assert len(tree_of(tmp_path / "cache")) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_cache_write_fails(pin: Pin, tmp_path: Path, code: int) -> None:
    def fetch(pin: Pin, out: BinaryIO) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(DiskError, match="FLASH_ATTENTION_CACHE"):
        cached_archive(pin, tmp_path / "cache", fetch)
    assert tree_of(tmp_path / "cache") == {}


def test_cache_folder_cannot_be_made(pin: Pin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="or set FLASH_ATTENTION_CACHE to a folder"):
        cached_archive(pin, tmp_path / "file" / "cache", Fetcher(b""))


def test_cache_folder_is_read_only(pin: Pin, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    probe = cache / "probe"
    with suppress(OSError):
        probe.touch()
    if probe.exists():
        pytest.skip("this user may write everywhere")
    with pytest.raises(DiskError, match="or set FLASH_ATTENTION_CACHE to a folder"):
        cached_archive(pin, cache, Fetcher(b""))


def test_disk_is_really_full(pin: Pin, tmp_path: Path) -> None:
    cache = tmp_path / "tiny"
    cache.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)]
    with suppress(OSError):
        subprocess.run(command, check=False, capture_output=True)
    if not os.path.ismount(cache):
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(DiskError, match="free some space"):
            cached_archive(pin, cache, Fetcher(b"x" * 1_000_000))
        assert tree_of(cache) == {}
    finally:
        subprocess.run(["umount", str(cache)], check=True)


def test_cache_dir(tmp_path: Path) -> None:
    assert cache_dir({"FLASH_ATTENTION_CACHE": str(tmp_path)}) == tmp_path
    assert cache_dir({}).name == "flash-attn-deterministic"


def test_archive_that_cannot_be_read(pin: Pin, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        source.check_archive(pin, tmp_path)


@pytest.mark.build
@pytest.mark.skipif(importlib.util.find_spec("unearth") is None, reason="unearth is not installed")
def test_pinned_release_is_fetched_and_placed(tmp_path: Path) -> None:
    from flash_attn_build.upstream.pin import load_pin

    found = read_sources(load_pin(), {"FLASH_ATTENTION_CACHE": str(tmp_path / "cache")})
    assert {"flash_attn/src/flash_fwd_kernel.h", "cutlass/include/cute/tensor.hpp"} <= set(found)


def test_archive_and_folder_give_the_same_files(archive: Path, tmp_path: Path) -> None:
    assert read_archive(archive) == read_folder(make_folder(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("csrc/flash_attn/src/a.h", "flash_attn/src/a.h"),
        ("csrc/flash_attn/src/../../../a.h", None),
        ("csrc/flash_attn/src/a.py", None),
        ("csrc/other/a.h", None),
        ("LICENSE", "licenses/FlashAttention-LICENSE"),
    ],
)
def test_only_what_is_used_gets_a_place(name: str, expected: str | None) -> None:
    assert placed(name) == expected


@pytest.mark.parametrize(
    "fields", [{"type": b"2", "linkname": "/etc/passwd"}, {}], ids=["link", "twice"]
)
def test_a_member_that_is_no_plain_file(tmp_path: Path, fields: dict[str, Any]) -> None:
    member = make_member(f"{ROOT}/csrc/flash_attn/src/fwd.cu", **fields)
    path = make_archive(tmp_path / "bad.tar.gz", extra=(member,))
    with pytest.raises(SourceError, match="is a link, or there twice"):
        read_archive(path)


@pytest.mark.parametrize("length", [0, 5, -40], ids=["empty", "start", "cut-off"])
def test_an_archive_that_is_not_whole(archive: Path, length: int) -> None:
    archive.write_bytes(archive.read_bytes()[:length])
    with pytest.raises(SourceError, match="is not a readable archive"):
        read_archive(archive)


@pytest.mark.parametrize("part", ["LICENSE", "csrc/flash_attn/src", "csrc/cutlass/include"])
def test_a_part_that_is_missing_is_named(tmp_path: Path, part: str) -> None:
    files = {name: text for name, text in FILES.items() if not name.startswith(part)}
    with pytest.raises(SourceError, match="lacks what goes to"):
        read_archive(make_archive(tmp_path / "lacking.tar.gz", files))
    with pytest.raises(SourceError, match="cannot be read"):
        read_folder(make_folder(tmp_path / "folder", files))
