"""pip's configuration, as pip tells it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from flash_attn_build.errors import PipConfigError
from flash_attn_build.upstream.pip_settings import (
    PipSettings,
    parse_config_list,
    read_pip_settings,
    to_settings,
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No configuration but what a test writes to the returned file."""
    for name in os.environ:
        if name.startswith(("PIP_", "XDG_")) or name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "none"))
    config = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    return config


def test_environment_wins_over_section_over_global() -> None:
    lines = (
        ":env:.find-links='env\\nmore'",
        "download.timeout='7'",
        "global.find-links='global'",
        "global.index-url='global'",
        "global.timeout='5'",
        "install.index-url='install'",
        "wheel.index-url='not ours'",
    )
    assert parse_config_list("\n".join(lines)) == {
        "find-links": "env\nmore",
        "index-url": "install",
        "timeout": "7",
    }


@pytest.mark.parametrize(
    "line", ["global.index-url=secret", "secret", "index-url='secret'", "global.x=1"]
)
def test_other_line_is_refused_without_its_value(line: str) -> None:
    with pytest.raises(PipConfigError) as caught:
        parse_config_list(line)
    assert "=secret" not in str(caught.value)
    assert "'secret'" not in str(caught.value).replace(repr(line), "")


def test_settings() -> None:
    options = {
        "index-url": "file:///index", "extra-index-url": "file:///a\nfile:///b  file:///c",
        "find-links": "/x /y", "no-index": "True", "trusted-host": "one two:81", "cert": "/ca",
        "client-cert": "/me", "proxy": "http://proxy", "timeout": "3.5", "retries": "2",
    }  # fmt: skip
    assert to_settings(options, {"REQUESTS_CA_BUNDLE": "/other"}) == PipSettings(
        index_url="file:///index",
        extra_index_urls=("file:///a", "file:///b", "file:///c"),
        find_links=("/x", "/y"),
        no_index=True,
        trusted_hosts=("one", "two:81"),
        cert="/ca",
        client_cert="/me",
        proxy="http://proxy",
        timeout=3.5,
        retries=2,
    )
    assert to_settings({}, {}) == PipSettings()
    assert to_settings({}, {"CURL_CA_BUNDLE": "/ca"}).cert == "/ca"


@pytest.mark.parametrize(
    ("name", "value"),
    [("no-index", "maybe"), ("timeout", "soon"), ("timeout", "-1"), ("retries", "inf")],
)
def test_malformed_value_is_named(name: str, value: str) -> None:
    with pytest.raises(PipConfigError, match=f"option {name}: expected .* got '{value}'"):
        to_settings({name: value}, {})


def test_file_and_environment(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean.write_text(
        "[global]\nindex-url = file:///from-file\nfind-links =\n    /a\n    /b\ntimeout = 9\n"
        "[install]\nindex_url = file:///from-section\n"
    )
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "4")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "one two")
    settings = read_pip_settings()
    assert settings.index_url == "file:///from-section"
    assert settings.find_links == ("/a", "/b")
    assert settings.timeout == 4.0
    assert settings.trusted_hosts == ("one", "two")


def test_unreadable_file(clean: Path) -> None:
    clean.write_text("no section\n")
    with pytest.raises(PipConfigError, match="pip"):
        read_pip_settings()
