"""Where the sources come from: given, cached or fetched; and what is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from flash_attn_build.errors import RefusedError, SettingError, ToolchainError
from flash_attn_build.upstream import source
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import CUTLASS_LICENCE
from flash_attn_build.upstream.source import find_archive, placed, read_archive, read_sources
from upstream_samples import FILES, PREPARED, make_archive, make_folder, tree_of


class Fetcher:
    """Stands for the network: writes given bytes, and counts how often."""

    def __init__(self, content: bytes = b"", failure: BaseException | None = None) -> None:
        self.content, self.failure = content, failure
        self.calls = 0

    def __call__(self, pin: Pin, out: BinaryIO) -> None:
        self.calls += 1
        out.write(self.content)
        if self.failure:
            raise self.failure


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, archive: Path) -> Fetcher:
    fetcher = Fetcher(archive.read_bytes())
    monkeypatch.setattr(source, "download", fetcher)
    return fetcher


def given(pin: Pin, path: Path | str) -> dict[str, bytes]:
    return read_sources(pin, {"FLASH_ATTENTION_SOURCE": str(path)})


def test_a_given_source_needs_no_network(
    pin: Pin, archive: Path, tmp_path: Path, network: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = {"setup.py": "", "csrc/flash_attn/src/softmax.h.orig": "", "csrc/x/y.h": ""}
    found = given(pin, make_folder(tmp_path / "folder", {**FILES, **unused}))
    assert set(found) == PREPARED - {CUTLASS_LICENCE}
    assert given(pin, archive) == found
    monkeypatch.chdir(archive.parent)
    assert given(pin, archive.name) == found
    with pytest.raises(SettingError, match="expected an archive or a folder"):
        given(pin, tmp_path / "none")
    assert network.calls == 0


def test_a_given_archive_with_another_hash(pin: Pin, archive: Path) -> None:
    archive.write_bytes(b"other")
    with pytest.raises(RefusedError, match=f"with sha256 {pin.sha256}, found d9298a10"):
        given(pin, archive)


@pytest.mark.parametrize(
    "change",
    [
        {"csrc/flash_attn/src/softmax.h": "changed\n"},
        {"csrc/cutlass/include/cute/more.hpp": ""},
        {"LICENSE": "changed\n"},
    ],
    ids=["changed", "added", "licence"],
)
def test_a_given_folder_that_was_changed(pin: Pin, tmp_path: Path, change: dict[str, str]) -> None:
    folder = make_folder(tmp_path / "folder", {**FILES, **change})
    with pytest.raises(RefusedError, match=r"were changed, added or removed.*unpack it afresh"):
        given(pin, folder)
    (folder / "LICENSE").unlink()
    with pytest.raises(RefusedError, match="cannot be read"):
        given(pin, folder)


@pytest.mark.parametrize("damage", [None, b"", b"damaged"], ids=["none", "empty", "other"])
def test_cache_is_filled_once_and_again_where_it_is_damaged(
    pin: Pin, archive: Path, tmp_path: Path, network: Fetcher, damage: bytes | None
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = find_archive(pin, environ)
    assert first.parent == tmp_path / "cache" / "flash-attn-deterministic"
    if damage is not None:
        first.write_bytes(damage)
    assert find_archive(pin, environ) == first
    assert network.calls == (1 if damage is None else 2)
    assert tree_of(first.parent) == {f"{pin.sha256}.tar.gz": archive.read_bytes()}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (None, RefusedError),
        (ToolchainError("x"), ToolchainError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(143), SystemExit),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ToolchainError),
    ],
    ids=["other bytes", "network", "interrupt", "terminated", "full"],
)
def test_nothing_wrong_or_half_written_stays(
    pin: Pin, tmp_path: Path, network: Fetcher, failure: BaseException | None, expected: Any
) -> None:
    network.content, network.failure = b"half", failure
    with pytest.raises(expected):
        find_archive(pin, {"FLASH_ATTENTION_CACHE": str(tmp_path / "cache")})
    assert tree_of(tmp_path / "cache") == {}


def test_concurrent_builds_share_a_cache(pin: Pin, tmp_path: Path, network: Fetcher) -> None:
    environ = {"FLASH_ATTENTION_CACHE": str(tmp_path / "cache")}
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(find_archive, pin, environ) for _ in range(16)]
    assert {run.result().read_bytes() for run in runs} == {network.content}
    assert len(tree_of(tmp_path / "cache")) == 1


@pytest.mark.build
def test_pinned_release_is_fetched_and_placed(tmp_path: Path) -> None:
    found = read_sources(load_pin(), {"FLASH_ATTENTION_CACHE": str(tmp_path / "cache")})
    assert {"flash_attn/src/flash_fwd_kernel.h", "cutlass/include/cute/tensor.hpp"} <= set(found)


def test_only_what_is_used_gets_a_place() -> None:
    assert placed("csrc/flash_attn/src/a.h") == "flash_attn/src/a.h"
    assert placed("LICENSE") == "licenses/FlashAttention-LICENSE"
    for name in ("flash_attn/src/../../../a.h", "flash_attn/src/a.py", "other/a.h"):
        assert placed(f"csrc/{name}") is None


def cut(length: int) -> Callable[[Path], object]:
    return lambda path: make_archive(path).write_bytes(path.read_bytes()[:length])


ARCHIVES: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda path: make_archive(path, type=b"2", linkname="/etc/passwd"), "is a link, or"),
    "twice": (lambda path: make_archive(path, size=0), "is a link, or there twice"),
    "empty": (cut(0), "cannot be read"),
    "cut off": (cut(-40), "cannot be read"),
}


@pytest.mark.parametrize(("write", "words"), ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_is_refused(
    pin: Pin, archive: Path, write: Callable[[Path], object], words: str, monkeypatch: Any
) -> None:
    write(archive)
    monkeypatch.setattr(source, "check_archive", lambda *_: None)  # as if its hash were pinned
    with pytest.raises(RefusedError, match=words):
        given(pin, archive)
    with pytest.raises(Exception, match=r"."):
        read_archive(archive)
