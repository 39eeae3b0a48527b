"""Find the pinned source distribution through the user's pip settings, and download it.

The `unearth` package searches and downloads as pip does, but runs nothing: `pip download` would
run upstream's setup.py, which wants torch.
"""

from __future__ import annotations

import ast
import hashlib
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from ..errors import RefusedError, SettingError, ToolchainError
from .pin import Pin

if TYPE_CHECKING:
    from unearth import Link, PackageFinder
    from unearth.fetchers import Fetcher, PyPIClient

_T = TypeVar("_T")
OFFLINE = "set FLASH_ATTENTION_SOURCE to the archive, or to a folder with its content"
CHECK = f"check pip's settings (`pip config list`), or {OFFLINE}"


def pip_options() -> dict[str, str]:
    """The options that `pip download` would use here, by name, as `pip config list` tells them."""
    command = [sys.executable, "-m", "pip", "--no-input", "config", "list"]
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())
        raise SettingError(f"`pip config list` failed: {said}; {CHECK}")
    found = {}
    for section in ("global.", "install.", "download.", ":env:."):  # each wins over those before
        for line in done.stdout.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                name = key.removeprefix(section).lower().replace("_", "-")
                found[name.replace("default-timeout", "timeout")] = str(ast.literal_eval(value))
    return found


def download(pin: Pin, out: BinaryIO) -> None:
    """Writes the pinned archive to a file, from the first package source that has it.

    Args:
        pin: What to fetch.
        out: Binary file, open for writing; on failure its content is undefined.

    Raises:
        ToolchainError: No source has the archive, or `unearth` is not installed.
        RefusedError: Sources have an archive of this name and version, with other bytes.
        SettingError: A setting of pip's cannot be used.
    """
    try:
        import httpx2
        from unearth.errors import URLError
    except ImportError as error:
        raise ToolchainError(f"{error}: `python -m pip install unearth`, or {OFFLINE}") from error
    options = pip_options()
    problems: list[str] = []
    others: list[str] = []
    try:
        retries = int(options.get("retries", "5"))
        client = _client(options, problems)
    except (OSError, ValueError, ImportError) as error:
        raise SettingError(
            f"pip's timeout, retries, certificates, proxy: {error}; {CHECK}"
        ) from error
    with client:
        finder = _finder(client, options, pin)
        sources = list(finder.sources)
        for source in sources:
            finder.sources = [source]  # one that fails does not stop the search
            try:
                for link in _tried(retries, lambda: _links(finder, pin)):
                    got = ", ".join((link.hash_option or {}).get("sha256", [pin.sha256]))
                    if pin.sha256 in got:
                        got = _tried(retries, lambda link=link: _save(client, link, pin, out))  # type: ignore[misc]
                    if got == pin.sha256:
                        return
                    others.append(f"{link.redacted} has sha256 {got}")
            except (httpx2.HTTPError, httpx2.InvalidURL, URLError) as error:
                problems.append(f"{_redacted(source['url'])}: {error!r}")
    wanted = f"{pin.name} {pin.version} (source distribution, sha256 {pin.sha256})"
    if others:
        raise RefusedError(
            f"{wanted}: {'; '.join(others)}; find out why other bytes are served; {CHECK}"
        )
    searched = ", ".join(_redacted(source["url"]) for source in sources)
    raise ToolchainError(
        f"{wanted}: not found in {searched or 'any source, for pip has none'}. "
        f"{'; '.join([*dict.fromkeys(problems), CHECK])}"
    )


def _client(options: dict[str, str], problems: list[str]) -> PyPIClient:
    """The client that speaks to indexes; `problems` receives a line for each bad answer."""
    import httpx2
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    def note(response: httpx2.Response) -> None:
        # unearth takes any bad status for an empty page; only 404 means that.
        if response.status_code >= 400 and response.status_code != 404:
            problems.append(f"{_redacted(str(response.url))}: {response.status_code}")

    variables = map(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
    bundle = next(filter(None, [options.get("cert"), *variables]), None)
    verify: ssl.SSLContext | bool = True
    if bundle or options.get("client-cert"):
        place = os.path.expanduser(bundle) if bundle else None
        folder = place is not None and os.path.isdir(place)
        verify = ssl.create_default_context(
            cafile=None if folder else place, capath=place if folder else None
        )
        if key := options.get("client-cert"):
            verify.load_cert_chain(os.path.expanduser(key))
    hosts, proxy = options.get("trusted-host", "").split(), options.get("proxy") or None
    # unearth's own transport for trusted hosts would go around the proxy.
    around = {f"all://{host}": httpx2.HTTPTransport(verify=False, proxy=proxy) for host in hosts}
    client = PyPIClient(
        trusted_hosts=hosts, verify=verify, timeout=float(options.get("timeout", "15")),
        proxy=proxy, mounts=around if proxy else {}, follow_redirects=True,
        event_hooks={"response": [note]},
    )  # fmt: skip
    indexes = f"{options.get('index-url', '')} {options.get('extra-index-url', '')}".split()
    client.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
    return client


def _finder(client: PyPIClient, options: dict[str, str], pin: Pin) -> PackageFinder:
    """The finder for the user's package sources, local ones first; it takes no wheel."""
    from unearth import PackageFinder

    def urls(option: str) -> list[str]:
        places = options.get(option, "").split()
        return [p if "://" in p else Path(p).expanduser().absolute().as_uri() for p in places]

    # Given no index, it takes the default one. The cast: unearth's client does not quite match
    # unearth's protocol for clients.
    finder = PackageFinder(
        cast("Fetcher", client), index_urls=urls("index-url"), no_binary=[pin.name]
    )
    for url in urls("extra-index-url"):
        finder.add_index_url(url)
    no_index = options.get("no-index", "").lower() in ("1", "y", "yes", "t", "true", "on")
    indexes, finder.sources = [] if no_index else finder.sources, []
    for url in urls("find-links"):
        finder.add_find_links(url)
    finder.sources += indexes
    return finder


def _links(finder: PackageFinder, pin: Pin) -> list[Link]:
    return [package.link for package in finder.find_matches(f"{pin.name}=={pin.version}")]


def _redacted(url: str) -> str:
    from unearth import Link

    return Link(url).redacted


def _save(client: PyPIClient, link: Link, pin: Pin, out: BinaryIO) -> str:
    """Downloads to `out`; returns the sha256 of what came, or why it was not read to its end."""
    out.seek(0)
    out.truncate()
    digest = hashlib.sha256()
    # Some servers call a .tar.gz "gzip-encoded"; the bytes as stored are wanted.
    headers = {"Accept-Encoding": "identity"}
    with client.stream("GET", link.url_without_fragment, headers=headers) as response:
        response.raise_for_status()
        for chunk in response.iter_raw(1 << 16):
            out.write(chunk)
            digest.update(chunk)
            if out.tell() > pin.size:
                return f"of more than the expected {pin.size} bytes"
    return digest.hexdigest()


def _tried(retries: int, action: Callable[[], _T]) -> _T:
    import httpx2

    for attempt in range(retries):
        try:
            return action()
        except httpx2.TransportError:
            time.sleep(0.25 * 2**attempt)
    return action()
