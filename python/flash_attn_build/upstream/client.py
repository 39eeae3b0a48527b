"""unearth's client and finder, set up as the user's pip is."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flash_attn_build.upstream.errors import PipConfigError
from flash_attn_build.upstream.pin import Pin
from flash_attn_build.upstream.pip_settings import PipSettings

if TYPE_CHECKING:
    import httpx2
    from unearth import PackageFinder
    from unearth.fetchers import Fetcher, PyPIClient

# unearth is imported late: a build that finds its sources in the cache needs none of it.


@contextmanager
def open_client(settings: PipSettings, failures: list[str]) -> Iterator[PyPIClient]:
    """Open the client that speaks to indexes.

    Args:
        settings: Proxy, certificates, hosts and time limit.
        failures: Receives a line for each bad answer.

    Returns:
        The client.

    Raises:
        PipConfigError: A certificate or the proxy cannot be used.
    """
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


def make_finder(client: PyPIClient, settings: PipSettings, pin: Pin) -> PackageFinder:
    """Make the finder for the user's package sources, local ones first.

    Args:
        client: See `open_client`.
        settings: The sources.
        pin: What is wanted; no wheel of it is taken.

    Returns:
        The finder.
    """
    from unearth import PackageFinder

    index = [_location(settings.index_url)] if settings.index_url else []
    # Without a source of its own the finder takes the default index: the rest is added after.
    # The cast: unearth's client does not quite match unearth's protocol for clients.
    fetcher = cast("Fetcher", client)
    finder = PackageFinder(fetcher, index_urls=index, no_binary=[pin.name])
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
    """Return a URL for a URL or a path."""
    return place if "://" in place else Path(place).expanduser().absolute().as_uri()


def _exists(url: str) -> bool:
    from unearth import Link

    link = Link(url)
    if link.is_file and not os.path.exists(link.file_path):
        print(f"warning: {link.redacted}: does not exist; skipped, as pip does", file=sys.stderr)
        return False
    return True
