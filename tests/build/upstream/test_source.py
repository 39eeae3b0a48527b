"""Where the sources come from: given, cached or fetched; and what is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from flash_attn_build.errors import DiskError, HashMismatchError, NetworkError, SourceError
from flash_attn_build.upstream import source
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import CUTLASS_LICENCE
from flash_attn_build.upstream.source import (
    cache_dir,
    cached_archive,
    placed,
    read_archive,
    read_folder,
    read_sources,
)
from upstream_samples import FILES, PREPARED, make_archive, make_folder, tree_of


class Fetcher:
    """Stands for the network: writes given bytes, and counts how often."""

    def __init__(self, content: bytes, failure: BaseException | None = None) -> None:
        self.content, self.failure = content, failure
        self.calls = 0

    def __call__(self, pin: Pin, out: BinaryIO) -> None:
        self.calls += 1
        out.write(self.content)
        out.flush()
        if self.failure:
            raise self.failure


def _given(pin: Pin, path: Path | str) -> dict[str, bytes]:
    return read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(path)})


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(source, "download", no_network)
    monkeypatch.setattr(source, "read_pip_settings", no_network)


@pytest.mark.usefixtures("offline")
def test_given_source_needs_no_network(
    pin: Pin, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = {"setup.py": "", "csrc/flash_attn/src/softmax.h.orig": "", "csrc/x/y.h": ""}
    found = _given(pin, make_folder(tmp_path / "folder", {**FILES, **unused}))
    assert set(found) == PREPARED - {CUTLASS_LICENCE}
    assert _given(pin, archive) == found
    monkeypatch.chdir(archive.parent)
    assert _given(pin, archive.name) == found


def test_given_path_does_not_exist(pin: Pin, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        _given(pin, tmp_path / "none")


def test_given_archive_has_wrong_hash(pin: Pin, archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(b"other")
    with pytest.raises(HashMismatchError, match=f"with sha256 {pin.sha256}, found d9298a10"):
        _given(pin, archive)
    with pytest.raises(SourceError, match="cannot be read"):
        source.check_archive(pin, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"csrc/flash_attn/src/softmax.h": "changed\n"},
        {"csrc/cutlass/include/cute/more.hpp": ""},
        {"LICENSE": "changed\n"},
    ],
    ids=["changed", "added", "licence"],
)
def test_given_folder_has_changed_files(pin: Pin, tmp_path: Path, change: dict[str, str]) -> None:
    folder = make_folder(tmp_path / "folder", {**FILES, **change})
    with pytest.raises(SourceError, match=r"were changed, added or removed.*unpack the source"):
        _given(pin, folder)


@pytest.mark.parametrize("damage", [None, b"", b"damaged"], ids=["none", "empty", "other"])
def test_cache_is_filled_once_and_again_where_it_is_damaged(
    pin: Pin,
    archive: Path,
    tmp_path: Path,
    damage: bytes | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fetch = Fetcher(archive.read_bytes())
    cache = tmp_path / "a" / "cache"
    first = cached_archive(pin, cache, fetch)
    if damage is not None:
        first.write_bytes(damage)
    assert cached_archive(pin, cache, fetch) == first
    assert fetch.calls == (1 if damage is None else 2)
    assert ("damaged" in capsys.readouterr().err) == (damage is not None)
    assert tree_of(cache) == {f"{pin.sha256}.tar.gz": archive.read_bytes()}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (None, HashMismatchError),
        (NetworkError("x"), NetworkError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(143), SystemExit),
        *((OSError(code, os.strerror(code)), DiskError) for code in (errno.ENOSPC, errno.EROFS)),
    ],
    ids=["other bytes", "network", "interrupt", "terminated", "full", "read-only"],
)
def test_nothing_wrong_or_half_written_stays(
    pin: Pin, tmp_path: Path, failure: BaseException | None, expected: type[BaseException]
) -> None:
    words = "or set FLASH_ATTENTION_CACHE to a folder" if expected is DiskError else None
    with pytest.raises(expected, match=words):
        cached_archive(pin, tmp_path / "cache", Fetcher(b"half", failure))
    assert tree_of(tmp_path / "cache") == {}


def test_concurrent_builds_share_a_cache(pin: Pin, archive: Path, tmp_path: Path) -> None:
    fetch = Fetcher(archive.read_bytes())
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(cached_archive, pin, tmp_path / "cache", fetch) for _ in range(16)]
    assert {run.result().read_bytes() for run in runs} == {fetch.content}
    assert len(tree_of(tmp_path / "cache")) == 1


def test_cache_dir(tmp_path: Path) -> None:
    assert cache_dir({"FLASH_ATTENTION_CACHE": str(tmp_path)}) == tmp_path
    assert cache_dir({}).name == "flash-attn-deterministic"


@pytest.mark.build
def test_pinned_release_is_fetched_and_placed(tmp_path: Path) -> None:
    found = read_sources(load_pin(), {"FLASH_ATTENTION_CACHE": str(tmp_path / "cache")})
    assert {"flash_attn/src/flash_fwd_kernel.h", "cutlass/include/cute/tensor.hpp"} <= set(found)


def test_only_what_is_used_gets_a_place() -> None:
    assert placed("csrc/flash_attn/src/a.h") == "flash_attn/src/a.h"
    assert placed("LICENSE") == "licenses/FlashAttention-LICENSE"
    for name in ("flash_attn/src/../../../a.h", "flash_attn/src/a.py", "other/a.h"):
        assert placed(f"csrc/{name}") is None


def _cut(length: int) -> Callable[[Path], object]:
    return lambda path: make_archive(path).write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: make_archive(path, type=b"2", linkname="/etc/passwd"), "is a link, or there"),
        (lambda path: make_archive(path, size=0), "is a link, or there twice"),
        *((_cut(length), "is not a readable archive") for length in (0, 5, -40)),
    ],
    ids=["link", "twice", "empty", "start", "cut off"],
)
def test_an_archive_that_is_refused(tmp_path: Path, write: Any, words: str) -> None:
    write(tmp_path / "bad.tar.gz")
    with pytest.raises(SourceError, match=words):
        read_archive(tmp_path / "bad.tar.gz")


@pytest.mark.parametrize("part", ["LICENSE", "csrc/flash_attn/src", "csrc/cutlass/include"])
def test_a_part_that_is_missing_is_named(tmp_path: Path, part: str) -> None:
    files = {name: text for name, text in FILES.items() if not name.startswith(part)}
    with pytest.raises(SourceError, match="lacks what goes to"):
        read_archive(make_archive(tmp_path / "lacking.tar.gz", files))
    with pytest.raises(SourceError, match="cannot be read"):
        read_folder(make_folder(tmp_path / "folder", files))
