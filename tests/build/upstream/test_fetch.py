"""Downloading, from folders and over loopback HTTP, by pip with its own settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from flash_attn_build.errors import RefusedError, ToolchainError
from flash_attn_build.files import sha256_of, write_text
from flash_attn_build.upstream import fetch
from flash_attn_build.upstream.pin import Pin
from stand_ins import static
from upstream_samples import FILES, SDIST, make_archive, make_index

Download = Callable[..., bytes]


@pytest.fixture
def download(pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """Downloads with no setting of pip's but those that are given, in its file."""
    proxies = ("http_proxy", "https_proxy", "all_proxy", "requests_ca_bundle", "curl_ca_bundle")
    for name in os.environ:
        if name.startswith(("PIP_", "XDG_")) or name.lower() in proxies:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))

    def download(**options: str) -> bytes:
        lines = [f"{name} = {value}" for name, value in {"retries": "0", **options}.items()]
        write_text(tmp_path / "pip.conf", "\n".join(["[global]", *lines, ""]))
        folder = tmp_path / f"fetched-{len([*tmp_path.glob('fetched-*')])}"
        return fetch.download(pin, folder).read_bytes()

    return download


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_folder(pin: Pin, archive: Path, download: Download) -> None:
    """Nothing of the archive is run: its setup.py would fail. A wheel is passed over."""
    (archive.parent / f"flash_attn-{pin.version}-py3-none-any.whl").write_bytes(b"wheel")
    links = f"{archive.parent}/gone {archive.parent}"
    assert download(no_index="true", find_links=links) == archive.read_bytes()


def test_a_source_that_fails_does_not_stop_the_search(
    archive: Path, tmp_path: Path, closed_port: str, download: Download
) -> None:
    write_text(tmp_path / "other" / SDIST, "other")
    with static(make_index(tmp_path / "index", archive)) as url:
        urls = {"index_url": f"http://{closed_port}", "extra_index_url": url}
        found = download(**urls, find_links=str(tmp_path / "other"))
    assert found == archive.read_bytes()


def test_what_is_not_there_is_said_without_a_password(
    pin: Pin, archive: Path, tmp_path: Path, closed_port: str, download: Download
) -> None:
    def told(**options: str) -> str:
        with pytest.raises(ToolchainError, match="FLASH_ATTENTION_SOURCE") as caught:
            download(**options)
        assert pin.version in str(caught.value)
        return str(caught.value)

    said = told(index_url=f"http://user:secret@{closed_port}/x")
    assert f"@{closed_port}/x/flash-attn/: connection error" in said
    assert "secret" not in said
    with static(tmp_path, refuse=True) as url:
        said = told(index_url=url)
    assert url in said
    assert "503" in said
    archive.unlink()
    assert f"in links: {archive.parent}" in told(no_index="1", find_links=str(archive.parent))
    assert "soon" in told(timeout="soon")
    assert "pip.conf" in told(**{"no": "section\n[global"})


def test_other_bytes_are_refused_before_they_can_do_anything(
    pin: Pin, archive: Path, tmp_path: Path, download: Download
) -> None:
    """Here: as a build backend of their own, which no stand-in keeps from running."""
    backend = '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    evil = f"open({str(tmp_path / 'evil')!r}, 'w')\n"
    make_archive(archive, {**FILES, "pyproject.toml": backend, "evil.py": evil})
    with static(archive.parent) as url, pytest.raises(RefusedError) as caught:
        download(no_index="1", find_links=f"{url}/")
    assert f"Expected sha256 {pin.sha256} Got {sha256_of(archive)}" in str(caught.value)
    assert not (tmp_path / "evil").exists()
