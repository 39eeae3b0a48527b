"""Find the pinned source distribution through the user's pip settings, and download it.

The `unearth` package searches and downloads as pip does, but runs nothing: `pip download` would
run upstream's setup.py, which wants torch.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from ..errors import HashMismatchError, NetworkError, NotOnIndexError, PipConfigError, StepError
from .pin import Pin
from .pip_settings import PipSettings

if TYPE_CHECKING:
    import httpx2
    from unearth import Link, PackageFinder
    from unearth.fetchers import Fetcher, PyPIClient

# unearth is imported late: a build that finds its sources in the cache needs none of it.

_T = TypeVar("_T")
OFFLINE = "set FLASH_ATTENTION_SOURCE to the archive, or to a folder with its content"
_CHUNK = 1 << 16


def download(pin: Pin, settings: PipSettings, out: BinaryIO) -> None:
    """Writes the pinned archive to a file.

    Sources are asked one after another; one that fails is no error while another has the archive.

    Args:
        pin: What to fetch.
        settings: Where from.
        out: Binary file, open for writing; on failure its content is undefined.

    Raises:
        NetworkError: No source has the archive, and at least one could not be read.
        NotOnIndexError: Every source was read, and none has the archive.
        HashMismatchError: Sources have an archive of this name and version, with other bytes.
        PipConfigError: A certificate or proxy of pip's configuration cannot be used.
        StepError: The package `unearth` is not installed.
        OSError: The file cannot be written.
    """
    try:
        import httpx2
        from unearth import Link
        from unearth.errors import URLError
    except ImportError as error:
        raise StepError(
            f"{pin.name} {pin.version} is not in the cache, and fetching it needs the package "
            f"unearth ({error}); `python -m pip install unearth`, or {OFFLINE}"
        ) from error

    failures: list[str] = []
    mismatches: list[str] = []
    searched: list[str] = []
    # URLError, InvalidURL: a malformed index or link; OSError: a local one that can't be read.
    unreadable = (httpx2.HTTPError, httpx2.InvalidURL, URLError, OSError)
    with _open_client(settings, failures) as client:
        finder = _make_finder(client, settings, pin)
        for source in list(finder.sources):
            name = Link(source["url"]).redacted
            searched.append(name)
            finder.sources = [source]
            try:
                links = _with_retries(settings, partial(_links, finder, pin))
            except unreadable as error:
                failures.append(f"{name}: {_describe(error)}")
                continue
            for link in links:
                offered = (link.hash_option or {}).get("sha256", [pin.sha256])
                if pin.sha256 not in offered:
                    mismatches.append(f"{link.redacted} announces sha256 {', '.join(offered)}")
                    continue
                out.seek(0)
                out.truncate()
                try:
                    found = _with_retries(settings, partial(_save, client, link, pin, out))
                except (httpx2.HTTPError, httpx2.InvalidURL, URLError) as error:
                    failures.append(f"{link.redacted}: {_describe(error)}")
                    continue
                if found == pin.sha256:
                    return
                mismatches.append(f"{link.redacted} has sha256 {found}")
    wanted = f"{pin.name} {pin.version} (source distribution)"
    if mismatches:
        raise HashMismatchError(
            f"{wanted}: expected sha256 {pin.sha256}, but {'; '.join(mismatches)}; do not use that "
            f"file: find out why your index serves it, choose another index, or {OFFLINE}"
        )
    if failures:
        reasons = "; ".join(dict.fromkeys(failures))
        raise NetworkError(
            f"{wanted}: could not be fetched: {reasons}; check the network and pip's "
            f"index, proxy and certificate settings (`pip config list`), or {OFFLINE}"
        )
    raise NotOnIndexError(
        f"{wanted}: not found in {', '.join(searched) or 'any source, for pip has none set'}; "
        "check pip's index-url, find-links, no-index and trusted-host settings "
        f"(`pip config list`), or {OFFLINE}"
    )


def _links(finder: PackageFinder, pin: Pin) -> list[Link]:
    return [package.link for package in finder.find_matches(f"{pin.name}=={pin.version}")]


def _save(client: PyPIClient, link: Link, pin: Pin, out: BinaryIO) -> str:
    """Downloads to `out`; returns the sha256 of what came, or why it was not read to its end."""
    out.seek(0)
    out.truncate()
    digest = hashlib.sha256()
    # Some servers call a .tar.gz "gzip-encoded"; the bytes as stored are wanted.
    headers = {"Accept-Encoding": "identity"}
    with client.stream("GET", link.url_without_fragment, headers=headers) as response:
        response.raise_for_status()
        for chunk in response.iter_raw(_CHUNK):
            out.write(chunk)
            digest.update(chunk)
            if out.tell() > pin.size:
                return f"of more than the expected {pin.size} bytes"
    out.flush()
    return digest.hexdigest()


def _with_retries(settings: PipSettings, action: Callable[[], _T]) -> _T:
    import httpx2

    for attempt in range(settings.retries):
        try:
            return action()
        except httpx2.TransportError:
            time.sleep(0.25 * 2**attempt)
    return action()


def _describe(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason_phrase}"
    return str(error) or type(error).__name__


@contextmanager
def _open_client(settings: PipSettings, failures: list[str]) -> Iterator[PyPIClient]:
    """Opens the client that speaks to indexes; `failures` receives a line for each bad answer."""
    import httpx2
    from unearth import Link
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    def note_failure(response: httpx2.Response) -> None:
        # unearth takes any bad status for an empty page; only 404 means that.
        if response.status_code >= 400 and response.status_code != 404:
            url = Link(str(response.url)).redacted
            failures.append(f"{url}: {response.status_code} {response.reason_phrase}")

    indexes = [url for url in (settings.index_url, *settings.extra_index_urls) if url]
    try:
        mounts: dict[str, httpx2.BaseTransport] = {}
        if settings.proxy:
            # unearth's own transport for trusted hosts would go around the proxy.
            for host in settings.trusted_hosts:
                mounts[f"all://{host}"] = httpx2.HTTPTransport(verify=False, proxy=settings.proxy)
        client = PyPIClient(
            trusted_hosts=settings.trusted_hosts,
            verify=_tls(settings),
            timeout=settings.timeout,
            proxy=settings.proxy,
            mounts=mounts,
            follow_redirects=True,
            event_hooks={"response": [note_failure]},
        )
    except (OSError, ValueError, ImportError) as error:
        raise PipConfigError(
            f"pip's options cert={settings.cert!r}, client-cert={settings.client_cert!r}, proxy: "
            f"cannot be used ({error}); correct them (`pip config list`)"
        ) from error
    with client:
        client.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
        yield client


def _tls(settings: PipSettings) -> ssl.SSLContext | bool:
    if settings.cert is None and settings.client_cert is None:
        return True
    bundle = Path(settings.cert).expanduser() if settings.cert else None
    context = ssl.create_default_context(
        cafile=bundle if bundle and not bundle.is_dir() else None,
        capath=bundle if bundle and bundle.is_dir() else None,
    )
    if settings.client_cert:
        context.load_cert_chain(Path(settings.client_cert).expanduser())
    return context


def _make_finder(client: PyPIClient, settings: PipSettings, pin: Pin) -> PackageFinder:
    """Makes the finder for the user's package sources, local ones first; it takes no wheel."""
    from unearth import PackageFinder

    index = [_location(settings.index_url)] if settings.index_url else []
    # Without a source of its own the finder takes the default index: the rest is added after.
    # The cast: unearth's client does not quite match unearth's protocol for clients.
    finder = PackageFinder(cast("Fetcher", client), index_urls=index, no_binary=[pin.name])
    for url in settings.extra_index_urls:
        finder.add_index_url(_location(url))
    if settings.no_index:
        finder.sources = []
    default_and_extra, finder.sources = finder.sources, []
    for place in settings.find_links:
        finder.add_find_links(_location(place))
    finder.sources += default_and_extra
    finder.sources = [source for source in finder.sources if _exists(source["url"])]
    return finder


def _location(place: str) -> str:
    """Returns a URL for a URL or a path."""
    return place if "://" in place else Path(place).expanduser().absolute().as_uri()


def _exists(url: str) -> bool:
    from unearth import Link

    link = Link(url)
    if link.is_file and not os.path.exists(link.file_path):
        print(f"warning: {link.redacted}: does not exist; skipped, as pip does", file=sys.stderr)
        return False
    return True
