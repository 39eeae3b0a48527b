"""The user's pip configuration: indexes, folders, proxy and certificates."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flash_attn_build.upstream.errors import PipConfigError

Options = dict[str, str]

# As pip does it: the environment wins over a command's section, and that one over [global].
_SECTIONS = ("global", "install", "download", ":env:")
_TRUE = {"y", "yes", "t", "true", "on", "1"}
_FALSE = {"n", "no", "f", "false", "off", "0", ""}


@dataclass(frozen=True)
class PipSettings:
    """What of pip's configuration concerns fetching.

    Args:
        index_url: None: the default index.
        extra_index_urls: Searched beside the index.
        find_links: Pages, archives or folders.
        no_index: Search `find_links` only.
        trusted_hosts: Hosts, with or without port, that need no valid certificate.
        cert: CA bundle, file or folder.
        client_cert: Certificate and key of the client in one file.
        proxy: URL of a proxy for everything.
        timeout: Seconds.
        retries: How often a failed connection is tried again.
    """

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    timeout: float = 15.0
    retries: int = 5


def read_pip_settings() -> PipSettings:
    """Read pip's configuration through pip itself, or its files and environment without pip.

    Returns:
        The settings that `pip download` would use in this environment.

    Raises:
        PipConfigError: The configuration cannot be read, or a value is malformed.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    options = _from_pip() if has_pip else _from_files_and_environment()
    return to_settings(options, os.environ)


def parse_config_list(text: str) -> Options:
    """Merge the output of `pip config list`.

    Args:
        text: Lines of `section.key='value'`; values are Python string literals.

    Returns:
        Value by option name, the strongest section's.

    Raises:
        PipConfigError: A line has another form.
    """
    sections: dict[str, Options] = {}
    for line in filter(None, text.splitlines()):
        full_key, equals, literal = line.partition("=")
        section, dot, key = full_key.partition(".")
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            value = None
        if not (equals and dot and isinstance(value, str)):
            # The line is not shown: it may hold a password.
            raise PipConfigError(
                f"`pip config list`: expected a line like section.key='value' for {full_key!r}; "
                "check the output of that command, or set FLASH_ATTENTION_SOURCE"
            )
        sections.setdefault(section, {})[key] = value
    return merge(sections)


def merge(sections: Mapping[str, Mapping[str, str]]) -> Options:
    """Merge configuration sections as pip does.

    Args:
        sections: Options by section.

    Returns:
        Value by option name, with `default-timeout` as `timeout`.
    """
    merged: Options = {}
    for section in _SECTIONS:
        for key, value in sections.get(section, {}).items():
            name = key.lower().replace("_", "-")
            merged["timeout" if name == "default-timeout" else name] = value
    return merged


def to_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> PipSettings:
    """Convert pip's option values.

    Args:
        options: Value by option name.
        environment: Environment variables, for the CA bundle variables that pip honours too.

    Returns:
        The settings.

    Raises:
        PipConfigError: A value is malformed.
    """
    bundle = environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE")
    return PipSettings(
        index_url=options.get("index-url") or None,
        extra_index_urls=tuple(options.get("extra-index-url", "").split()),
        find_links=tuple(options.get("find-links", "").split()),
        no_index=_boolean(options, "no-index"),
        trusted_hosts=tuple(options.get("trusted-host", "").split()),
        cert=options.get("cert") or bundle or None,
        client_cert=options.get("client-cert") or None,
        proxy=options.get("proxy") or None,
        timeout=_number(options, "timeout", PipSettings.timeout),
        retries=int(_number(options, "retries", PipSettings.retries)),
    )


def _from_pip() -> Options:
    command = [sys.executable, "-m", "pip", "--no-input", "config", "list"]
    # Without this, pip may print a notice between the lines.
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if run.returncode != 0:
        reason = " ".join(f"{run.stderr} {run.stdout}".split())
        raise PipConfigError(
            f"`pip config list` failed: {reason}; correct pip's configuration, or set "
            "FLASH_ATTENTION_SOURCE to the archive"
        )
    return parse_config_list(run.stdout)


def _from_files_and_environment() -> Options:
    sections: dict[str, Options] = {}
    for path in _config_files(os.environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError) as error:
            raise PipConfigError(
                f"{path}: cannot be read as pip's configuration: {error}"
            ) from error
        for section in parser.sections():
            sections.setdefault(section, {}).update(parser.items(section))
    sections[":env:"] = {
        key[len("PIP_") :]: value for key, value in os.environ.items() if key.startswith("PIP_")
    }
    return merge(sections)


def _config_files(environment: Mapping[str, str]) -> list[Path]:
    """List pip's configuration files, weakest first."""
    explicit = environment.get("PIP_CONFIG_FILE")
    if explicit == os.devnull:
        return []
    system = environment.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    user = environment.get("XDG_CONFIG_HOME") or "~/.config"
    files = [Path(folder) / "pip" / "pip.conf" for folder in system.split(os.pathsep)]
    files += [
        Path("/etc/pip.conf"),
        Path("~/.pip/pip.conf").expanduser(),
        Path(user).expanduser() / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    return [*files, Path(explicit)] if explicit else files


def _boolean(options: Mapping[str, str], name: str) -> bool:
    value = options.get(name, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise PipConfigError(f"pip's option {name}: expected true or false, got {value!r}; correct it")


def _number(options: Mapping[str, str], name: str, default: float) -> float:
    value = options.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise PipConfigError(f"pip's option {name}: expected a number, got {value!r}; correct it")
    return number
