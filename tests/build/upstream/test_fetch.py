"""Finding and downloading, from folders and over loopback HTTP."""

from __future__ import annotations

import io
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from flash_attn_build.errors import (
    HashMismatchError,
    NetworkError,
    NotOnIndexError,
    PipConfigError,
)
from flash_attn_build.upstream.fetch import _make_finder, _open_client, download
from flash_attn_build.upstream.pin import Pin
from flash_attn_build.upstream.pip_settings import PipSettings
from upstream_samples import SDIST, make_index, serve

SETTINGS = PipSettings(timeout=5.0, retries=0)
# no-index: nothing but what a test names is searched.
LOCAL = replace(SETTINGS, no_index=True)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def _download(pin: Pin, settings: PipSettings) -> bytes:
    out = io.BytesIO()
    download(pin, settings, out)
    return out.getvalue()


@pytest.mark.parametrize("as_url", [False, True], ids=["path", "url"])
def test_find_links_folder(pin: Pin, archive: Path, as_url: bool) -> None:
    # A wheel of the same version is passed over.
    (archive.parent / f"flash_attn-{pin.version}-py3-none-any.whl").write_bytes(b"wheel")
    place = archive.parent.as_uri() if as_url else str(archive.parent)
    assert _download(pin, replace(LOCAL, find_links=(place,))) == archive.read_bytes()


@pytest.mark.parametrize("announce", [False, True], ids=["bare", "announced"])
def test_http_index(pin: Pin, archive: Path, tmp_path: Path, announce: bool) -> None:
    index = make_index(tmp_path / "index", archive, pin.sha256 if announce else None)
    with serve(index) as url:
        assert _download(pin, replace(SETTINGS, index_url=url)) == archive.read_bytes()


def test_missing_folders_are_skipped(
    pin: Pin, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    settings = replace(
        SETTINGS,
        index_url=gone.as_uri(),
        extra_index_urls=(str(gone),),
        find_links=(str(gone), str(archive.parent)),
    )
    assert _download(pin, settings) == archive.read_bytes()
    assert capsys.readouterr().err.count("does not exist; skipped") == 3


def test_a_source_that_fails_does_not_stop_the_search(
    pin: Pin, archive: Path, tmp_path: Path, closed_port: str
) -> None:
    index = make_index(tmp_path / "index", archive)
    settings = replace(SETTINGS, index_url=closed_port, extra_index_urls=(index.as_uri(),))
    assert _download(pin, settings) == archive.read_bytes()
    other = tmp_path / "other" / SDIST
    other.parent.mkdir()
    other.write_bytes(b"other")
    settings = replace(LOCAL, find_links=(str(other.parent), str(archive.parent)))
    assert _download(pin, settings) == archive.read_bytes()


def test_refused_connections_are_tried_again_and_named(
    pin: Pin, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("flash_attn_build.upstream.fetch.time.sleep", pauses.append)
    index = closed_port.replace("://", "://user:secret@")
    with pytest.raises(NetworkError, match=r"\*\*\*@127\.0\.0\.1.* FLASH_ATT") as caught:
        _download(pin, replace(SETTINGS, index_url=f"{index}/simple", retries=3))
    assert closed_port.partition("://")[2] in str(caught.value)
    assert "secret" not in str(caught.value)
    assert pauses == [0.25, 0.5, 1.0]


def test_server_error_is_a_network_error(pin: Pin, tmp_path: Path) -> None:
    with serve(tmp_path, refuse=True) as url, pytest.raises(NetworkError, match="503"):
        _download(pin, replace(SETTINGS, index_url=url))


def test_not_on_the_index(pin: Pin, tmp_path: Path) -> None:
    with serve(tmp_path) as url, pytest.raises(NotOnIndexError, match="not found in ht") as caught:
        _download(pin, replace(SETTINGS, index_url=url))
    assert pin.version in str(caught.value)


def test_not_in_a_folder(pin: Pin, archive: Path) -> None:
    archive.rename(archive.with_name("flash_attn-1.0.tar.gz"))
    with pytest.raises(NotOnIndexError, match="not found in file"):
        _download(pin, replace(LOCAL, find_links=(str(archive.parent),)))
    with pytest.raises(NotOnIndexError, match="pip has none set"):
        _download(pin, LOCAL)


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"other", "has sha256 d9298a10"), (b"x" * 100_000, "of more than the expected")],
    ids=["smaller", "larger"],
)
def test_wrong_bytes(pin: Pin, archive: Path, content: bytes, found: str) -> None:
    archive.write_bytes(content)
    with serve(archive.parent) as url, pytest.raises(HashMismatchError, match=found) as caught:
        _download(pin, replace(LOCAL, find_links=(f"{url}/",)))
    assert pin.sha256 in str(caught.value)


def test_index_that_announces_another_hash(pin: Pin, archive: Path, tmp_path: Path) -> None:
    index = make_index(tmp_path / "index", archive, announced="a" * 64)
    with serve(index) as url, pytest.raises(HashMismatchError, match="announces sha256 aaaa"):
        _download(pin, replace(SETTINGS, index_url=url))


def test_default_index_stays_when_extra_ones_are_set(pin: Pin, tmp_path: Path) -> None:
    settings = replace(SETTINGS, extra_index_urls=(str(tmp_path),), find_links=(str(tmp_path),))
    with _open_client(settings, []) as session:
        (default,) = _make_finder(session, SETTINGS, pin).sources
        both = _make_finder(session, settings, pin).sources
    here = {"url": tmp_path.as_uri()}
    assert both == [{**here, "type": "find_links"}, default, {**here, "type": "index"}]


@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, cert="/no/such/bundle"),
        replace(SETTINGS, client_cert="/no/such/key"),
        replace(SETTINGS, proxy="gopher://proxy"),
    ],
    ids=["cert", "client-cert", "proxy"],
)
def test_unusable_settings(pin: Pin, settings: PipSettings) -> None:
    with pytest.raises(PipConfigError, match="pip config list"):
        _download(pin, settings)


@pytest.mark.parametrize("trusted", [(), ("localhost:9",)], ids=["plain", "trusted-host"])
def test_proxy_is_used(pin: Pin, archive: Path, tmp_path: Path, trusted: tuple[str, ...]) -> None:
    # A proxy is asked for the whole URL, which the server takes for a path.
    make_index(tmp_path / "http:" / "localhost:9" / "simple", archive)
    settings = replace(SETTINGS, index_url="http://localhost:9/simple", trusted_hosts=trusted)
    with serve(tmp_path) as url:
        assert _download(pin, replace(settings, proxy=url)) == archive.read_bytes()


def test_certificates_are_loaded(pin: Pin, archive: Path, tmp_path: Path) -> None:
    empty = tmp_path / "certificates"
    empty.mkdir()
    settings = replace(LOCAL, cert=str(empty), find_links=(str(archive.parent),))
    assert _download(pin, settings) == archive.read_bytes()
