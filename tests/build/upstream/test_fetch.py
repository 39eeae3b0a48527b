"""Finding and downloading, from folders and over loopback HTTP, by pip's own settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.upstream import fetch
from flash_attn_build.upstream.pin import Pin
from stand_ins import static
from upstream_samples import SDIST, make_index


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of pip's but what a test writes to the returned file, or sets."""
    proxies = ("http_proxy", "https_proxy", "all_proxy", "requests_ca_bundle", "curl_ca_bundle")
    for name in os.environ:
        if name.startswith(("PIP_", "XDG_")) or name.lower() in proxies:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return tmp_path / "pip.conf"


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def download(pin: Pin, patch: pytest.MonkeyPatch, **options: str) -> bytes:
    """Downloads with pip's options given as environment variables; pip itself reads them."""
    for name, value in {"retries": "0", "timeout": "5", **options}.items():
        patch.setenv(f"PIP_{name.upper()}", value)
    return fetch.download(pin, pin.path.parent / "fetched").read_bytes()


def test_the_environment_wins_over_sections_and_those_over_global(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        "[global]\nindex-url = file:///from-file\nfind-links =\n    /a\n    /b\ntimeout = 9\n"
        "[install]\nindex_url = file:///from-section\n[wheel]\nindex-url = file:///not-ours\n"
    )
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "4")
    found, wanted = fetch.pip_options(), ("index-url", "find-links", "timeout")
    assert [found[name] for name in wanted] == ["file:///from-section", "\n/a\n/b", "4"]
    config.write_text("no section\n")
    with pytest.raises(BuildError, match="pip config list"):
        fetch.pip_options()


@pytest.mark.parametrize("as_url", [False, True], ids=["path", "url"])
def test_a_folder(pin: Pin, archive: Path, as_url: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A wheel of the same version is passed over.
    (archive.parent / f"flash_attn-{pin.version}-py3-none-any.whl").write_bytes(b"wheel")
    place = archive.parent.as_uri() if as_url else str(archive.parent)
    found = download(pin, monkeypatch, no_index="1", find_links=f"{archive.parent}/gone {place}")
    assert found == archive.read_bytes()


def test_a_source_that_fails_does_not_stop_the_search(
    pin: Pin, archive: Path, tmp_path: Path, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / SDIST
    other.parent.mkdir()
    other.write_bytes(b"other")
    with static(make_index(tmp_path / "index", archive)) as url:
        urls = {"index_url": f"http://{closed_port}", "extra_index_url": url}
        found = download(pin, monkeypatch, **urls, find_links=str(other.parent))
    assert found == archive.read_bytes()


def test_refused_connections_are_tried_again_and_named_without_the_password(
    pin: Pin, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with pytest.raises(BuildError, match=r"\*\*\*@127\.0\.0\.1.* FLASH_ATT") as caught:
        download(pin, monkeypatch, index_url=f"http://user:secret@{closed_port}/x", retries="3")
    assert closed_port in str(caught.value)
    assert "secret" not in str(caught.value)
    assert pauses == [0.25, 0.5, 1.0, 0]


def test_what_is_not_there_is_said(
    pin: Pin, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with static(tmp_path, refuse=True) as url, pytest.raises(BuildError, match=f"{url}/.*503"):
        download(pin, monkeypatch, index_url=url)
    with static(tmp_path) as url, pytest.raises(BuildError, match=f"not found in {url}") as said:
        download(pin, monkeypatch, index_url=url)
    assert pin.version in str(said.value)
    archive.unlink()
    with pytest.raises(BuildError, match="not found in file"):
        download(pin, monkeypatch, no_index="1", find_links=str(archive.parent))
    with pytest.raises(BuildError, match="for pip has none"):
        download(pin, monkeypatch, find_links="")


def test_wrong_bytes(pin: Pin, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.write_bytes(b"other")
    with static(archive.parent) as url, pytest.raises(RefusedError, match="sha256 d929") as caught:
        download(pin, monkeypatch, no_index="1", find_links=f"{url}/")
    assert pin.sha256 in str(caught.value)


def test_the_default_index_stays_when_others_are_set(tmp_path: Path) -> None:
    here = {"url": tmp_path.as_uri()}
    (default,) = fetch.finder_for({}, []).sources
    options = {"extra-index-url": str(tmp_path), "find-links": str(tmp_path)}
    found = fetch.finder_for(options, []).sources
    assert found == [{**here, "type": "find_links"}, default, {**here, "type": "index"}]


@pytest.mark.parametrize(
    "option",
    [{"cert": "/no/such/bundle"}, {"proxy": "gopher://proxy"}, {"timeout": "soon"},
     {"retries": "some"}],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be_used(
    pin: Pin, option: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="pip config list"):
        download(pin, monkeypatch, **option)


def test_proxy_and_certificates(
    pin: Pin, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy is asked for the whole URL, which the server takes for a path.
    make_index(tmp_path / "http:" / "localhost:9" / "simple", archive)
    (tmp_path / "certificates").mkdir()
    options = {"index_url": "http://localhost:9/simple", "cert": str(tmp_path / "certificates")}
    with static(tmp_path) as url:
        assert download(pin, monkeypatch, proxy=url, **options) == archive.read_bytes()
