"""Finds the pinned source distribution where pip's settings point, and downloads it.

`unearth` searches as pip does, but runs nothing: `pip download` would run upstream's setup.py,
which wants torch.
"""

from __future__ import annotations

import ast
import os
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
from unearth import Link, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.errors import HashMismatchError, UnpackError
from unearth.fetchers import PyPIClient
from unearth.preparer import download_link

from ..errors import BuildError, RefusedError
from .pin import Pin

CHECK = "check pip's settings (`pip config list`), or set FLASH_ATTENTION_SOURCE to the archive"


def pip_options() -> dict[str, str]:
    """The options that `pip download` would use here, by name, as `pip config list` tells them."""
    command = [sys.executable, "-m", "pip", "--no-input", "config", "list"]
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())
        raise BuildError(f"`pip config list` failed: {said}; {CHECK}")
    found = {}
    for section in ("global.", "install.", "download.", ":env:."):  # each wins over those before
        for line in done.stdout.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                name = key.removeprefix(section).lower().replace("_", "-")
                found[name.replace("default-timeout", "timeout")] = str(ast.literal_eval(value))
    return found


def finder_for(options: dict[str, str], bad_answers: list[str]) -> Any:
    """unearth's finder with pip's options; notes a line for each bad answer of a server."""

    def note(response: Any) -> None:  # unearth takes any bad status for an empty page
        if response.status_code >= 400 and response.status_code != 404:
            bad_answers.append(f"{Link(str(response.url)).redacted}: {response.status_code}")

    def urls(option: str) -> list[str]:
        places = options.get(option, "").split()
        return [p if "://" in p else Path(p).expanduser().absolute().as_uri() for p in places]

    bundles = (options.get("cert"), *map(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")))
    place = os.path.expanduser(next(filter(None, bundles), "")) or None
    folder = place if place and os.path.isdir(place) else None
    client: Any = PyPIClient(
        verify=ssl.create_default_context(cafile=None if folder else place, capath=folder),
        trusted_hosts=options.get("trusted-host", "").split(),
        timeout=float(options.get("timeout", "15")),
        proxy=options.get("proxy") or None,
        follow_redirects=True,
        # Some servers call a .tar.gz "gzip-encoded"; the bytes as stored are wanted.
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [note]},
    )
    # Given no index, it takes the default one.
    finder = PackageFinder(client, index_urls=urls("index-url"), no_binary=[":all:"])
    for url in urls("extra-index-url"):
        finder.add_index_url(url)
    client.auth = MultiDomainBasicAuth(False, [source["url"] for source in finder.sources])
    if options.get("no-index", "").lower() in ("1", "y", "yes", "t", "true", "on"):
        finder.sources = []
    for url in urls("find-links"):
        finder.add_find_links(url)
    finder.sources.sort(key=lambda source: source["type"] == "index")  # a disk comes first
    return finder


def download(pin: Pin, folder: Path) -> Path:
    """Finds the pinned archive: returns a file of the pinned hash, in the folder or on a disk.

    Raises:
        RefusedError: Sources have an archive of this name and version, with other bytes.
        BuildError: No source has the archive, or a setting of pip's cannot be used.
    """
    options, problems, others = pip_options(), list[str](), list[str]()
    try:
        retries = int(options.get("retries", "5"))
        finder = finder_for(options, problems)
    except (OSError, ValueError, ImportError) as error:
        raise BuildError(
            f"pip's timeout, retries, certificates, proxy: {error}; {CHECK}"
        ) from error
    sources = {Link(source["url"]).redacted: source for source in finder.sources}
    for name, source in sources.items():  # one that fails does not stop the search
        finder.sources = [source]
        for pause in [0.25 * 2**attempt for attempt in range(retries)] + [0]:
            try:
                for found in finder.find_matches(f"{pin.name}=={pin.version}"):
                    link = found.link
                    try:
                        return download_link(finder.session, link, folder, {"sha256": [pin.sha256]})
                    except HashMismatchError as error:
                        others.append(f"{link.redacted} has sha256 {error.actual['sha256']}")
                break
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, UnpackError) as error:
                problems.append(f"{name}: {error!r}")
                if not isinstance(error, httpx2.TransportError):
                    break
                time.sleep(pause)
    wanted = f"{pin.name} {pin.version} (source distribution, sha256 {pin.sha256})"
    if others:
        raise RefusedError(
            f"{wanted}: {'; '.join(others)}; find out why other bytes are served; {CHECK}"
        )
    raise BuildError(
        f"{wanted}: not found in {', '.join(sources) or 'any source, for pip has none'}. "
        f"{'; '.join([*dict.fromkeys(problems), CHECK])}"
    )
