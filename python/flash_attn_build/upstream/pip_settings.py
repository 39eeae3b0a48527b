"""The user's pip configuration, as `pip config list` tells it: indexes, proxy, certificates."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PipConfigError

# As pip does it: the environment wins over a command's section, and that one over [global].
_SECTIONS = ("global", "install", "download", ":env:")
_TRUE = {"y", "yes", "t", "true", "on", "1"}
_FALSE = {"n", "no", "f", "false", "off", "0", ""}


@dataclass(frozen=True)
class PipSettings:
    """What of pip's configuration concerns fetching.

    Attributes:
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
    """Asks pip for its configuration.

    Returns:
        The settings that `pip download` would use in this environment.

    Raises:
        PipConfigError: There is no pip, it fails, or a value is malformed.
    """
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
    return to_settings(parse_config_list(run.stdout), os.environ)


def parse_config_list(text: str) -> dict[str, str]:
    """Merges the output of `pip config list` as pip itself does.

    Args:
        text: Lines of `section.key='value'`; values are Python string literals.

    Returns:
        Value by option name, the strongest section's.

    Raises:
        PipConfigError: A line has another form.
    """
    sections: dict[str, dict[str, str]] = {}
    for line in filter(None, text.splitlines()):
        full_key, _, literal = line.partition("=")
        section, _, key = full_key.partition(".")
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            value = None
        if not key or not isinstance(value, str):
            # The line is not shown: it may hold a password.
            raise PipConfigError(
                f"`pip config list`: expected a line like section.key='value' for {full_key!r}; "
                "check the output of that command, or set FLASH_ATTENTION_SOURCE"
            )
        name = key.lower().replace("_", "-")
        sections.setdefault(section, {})["timeout" if name == "default-timeout" else name] = value
    return {
        name: value
        for section in _SECTIONS
        for name, value in sections.get(section, {}).items()
    }  # fmt: skip


def to_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> PipSettings:
    """Converts pip's option values.

    Args:
        options: Value by option name.
        environment: Environment variables, for the CA bundle variables that pip honours too.

    Returns:
        The settings.

    Raises:
        PipConfigError: A value is malformed.
    """
    bundle = environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE")
    no_index = options.get("no-index", "").lower()
    if no_index not in _TRUE | _FALSE:
        raise PipConfigError(
            f"pip's option no-index: expected true or false, got {no_index!r}; correct it"
        )
    return PipSettings(
        index_url=options.get("index-url") or None,
        extra_index_urls=tuple(options.get("extra-index-url", "").split()),
        find_links=tuple(options.get("find-links", "").split()),
        no_index=no_index in _TRUE,
        trusted_hosts=tuple(options.get("trusted-host", "").split()),
        cert=options.get("cert") or bundle or None,
        client_cert=options.get("client-cert") or None,
        proxy=options.get("proxy") or None,
        timeout=_number(options, "timeout", PipSettings.timeout),
        retries=int(_number(options, "retries", PipSettings.retries)),
    )


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
