"""Find the pinned source distribution through the user's pip settings, and download it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from flash_attn_build.upstream.client import make_finder, open_client
from flash_attn_build.upstream.digest import Sha256Writer
from flash_attn_build.upstream.errors import (
    DependencyError,
    HashMismatchError,
    NetworkError,
    NotOnIndexError,
)
from flash_attn_build.upstream.pin import Pin
from flash_attn_build.upstream.pip_settings import PipSettings
from flash_attn_build.upstream.storage import disk_errors

if TYPE_CHECKING:
    from unearth import Link, PackageFinder
    from unearth.fetchers import PyPIClient

_T = TypeVar("_T")
OFFLINE = "set FLASH_ATTENTION_SOURCE to the archive, or to a folder with its content"
_CHUNK = 1 << 16


def download(pin: Pin, settings: PipSettings, out: BinaryIO, target: Path) -> None:
    """Write the pinned archive to a file.

    Sources are asked one after another; one that fails is no error while another has the archive.

    Args:
        pin: What to fetch.
        settings: Where from.
        out: Binary file, open for writing; on failure its content is undefined.
        target: Where the archive is going to be, for messages.

    Raises:
        NetworkError: No source has the archive, and at least one could not be read.
        NotOnIndexError: Every source was read, and none has the archive.
        HashMismatchError: Sources have an archive of this name and version, with other bytes.
        PipConfigError: A certificate or proxy of pip's configuration cannot be used.
        DiskFullError: The disk is full.
        NotWritableError: The file cannot be written.
        DependencyError: The package `unearth` is not installed.
    """
    try:
        import httpx2
        from unearth import Link
        from unearth.errors import URLError
    except ImportError as error:
        raise DependencyError(
            f"{pin.name} {pin.version} is not in the cache, and fetching it needs the package "
            f"unearth ({error}); `python -m pip install unearth`, or {OFFLINE}"
        ) from error

    failures: list[str] = []
    mismatches: list[str] = []
    searched: list[str] = []
    # URLError, InvalidURL: a malformed index or link; OSError: a local one that can't be read.
    unreadable = (httpx2.HTTPError, httpx2.InvalidURL, URLError, OSError)
    with open_client(settings, failures) as client:
        finder = make_finder(client, settings, pin)
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
                try:
                    save = partial(_save, client, link, pin, out, target)
                    found = _with_retries(settings, save)
                except unreadable as error:
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


def _save(client: PyPIClient, link: Link, pin: Pin, out: BinaryIO, target: Path) -> str:
    """Download to `out`; return the sha256 of what came, or why it was not read to its end."""
    advice = "point FLASH_ATTENTION_CACHE at a folder with room that you may write to"
    with disk_errors(target, advice):
        out.seek(0)
        out.truncate()
    writer = Sha256Writer(out)
    # Some servers call a .tar.gz "gzip-encoded"; the bytes as stored are wanted.
    headers = {"Accept-Encoding": "identity"}
    with client.stream("GET", link.url_without_fragment, headers=headers) as response:
        response.raise_for_status()
        for chunk in response.iter_raw(_CHUNK):
            with disk_errors(target, advice):
                writer.write(chunk)
            if writer.size > pin.size:
                return f"of more than the expected {pin.size} bytes"
    with disk_errors(target, advice):
        out.flush()
    return writer.hexdigest()


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
