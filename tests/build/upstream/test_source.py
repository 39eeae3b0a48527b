"""Where the sources come from: given, cached or fetched; and what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.upstream import fetch
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import CUTLASS_LICENCE
from flash_attn_build.upstream.source import find_archive, placed, read_archive
from stand_ins import tree_of
from upstream_samples import PREPARED, make_archive


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, archive: Path) -> Mock:
    """Stands for the network, which has the archive."""
    monkeypatch.setattr(fetch, "download", download := Mock(return_value=archive))
    return download


def test_a_given_archive_needs_no_network(
    pin: Pin, archive: Path, tmp_path: Path, network: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(path: Path | str) -> Path:
        return find_archive(pin, {"FLASH_ATTENTION_SOURCE": str(path)})

    assert given(archive) == archive
    monkeypatch.chdir(archive.parent)
    assert given(archive.name) == archive
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(BuildError, match="expected an archive"):
            given(wrong)
    archive.write_bytes(b"other")
    with pytest.raises(RefusedError, match=f"with sha256 {pin.sha256}, found d9298a10"):
        given(archive)
    network.assert_not_called()


@pytest.mark.parametrize("damage", [None, b"", b"damaged"], ids=["none", "empty", "other"])
def test_cache_is_filled_once_and_again_where_it_is_damaged(
    pin: Pin, archive: Path, tmp_path: Path, network: Mock, damage: bytes | None
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = find_archive(pin, environ)
    assert first.parent == tmp_path / "cache" / "flash-attn-deterministic"
    if damage is not None:
        first.write_bytes(damage)
    assert find_archive(pin, environ) == first
    assert network.call_count == (1 if damage is None else 2)
    assert tree_of(first.parent) == {f"{pin.sha256}.tar.gz": archive.read_bytes()}


def test_nothing_half_written_stays(pin: Pin, tmp_path: Path, network: Mock) -> None:
    network.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(BuildError, match="No space left"):
        find_archive(pin, {"XDG_CACHE_HOME": str(tmp_path)})
    assert tree_of(tmp_path / "flash-attn-deterministic") == {}


@pytest.mark.build
def test_pinned_release_is_fetched_and_placed(tmp_path: Path) -> None:
    found = read_archive(find_archive(load_pin(), {"XDG_CACHE_HOME": str(tmp_path)}))
    assert {"flash_attn/src/flash_fwd_kernel.h", "cutlass/include/cute/tensor.hpp"} <= set(found)


def test_only_what_is_used_gets_a_place(archive: Path) -> None:
    assert set(read_archive(archive)) == PREPARED - {CUTLASS_LICENCE}
    for name in ("flash_attn/src/../../../a.h", "flash_attn/src/a.py", "other/a.h"):
        assert placed(f"csrc/{name}") is None


@pytest.mark.parametrize(
    "member", [{"type": b"2", "linkname": "/etc/passwd"}, {"size": 0}], ids=["link", "twice"]
)
def test_an_archive_that_is_refused(archive: Path, member: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="is a link, or there twice"):
        read_archive(make_archive(archive, **member))
