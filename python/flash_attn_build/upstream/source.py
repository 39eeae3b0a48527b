"""The checked source of a build: a given archive or folder, the cache, or the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from flash_attn_build.upstream import layout
from flash_attn_build.upstream.digest import sha256_of
from flash_attn_build.upstream.errors import (
    ChangedFilesError,
    DependencyError,
    HashMismatchError,
    SourceError,
    WrongVersionError,
)
from flash_attn_build.upstream.fetch import download
from flash_attn_build.upstream.pin import Pin
from flash_attn_build.upstream.pip_settings import read_pip_settings
from flash_attn_build.upstream.storage import disk_errors, replacing
from flash_attn_build.upstream.unpack import copy_folder, folder_version, unpack_archive

SOURCE_VARIABLE = "FLASH_ATTENTION_SOURCE"
CACHE_VARIABLE = "FLASH_ATTENTION_CACHE"

Download = Callable[[Pin, BinaryIO, Path], None]


def place_sources(pin: Pin, into: Path, environment: Mapping[str, str]) -> None:
    """Put upstream's used files, checked against the pin, in their places.

    Args:
        pin: What the sources must be.
        into: Existing, empty folder that receives the files.
        environment: Environment variables; those named in this module are read.

    Raises:
        BuildError: The sources cannot be had or are not the pinned ones; see `errors`.
    """
    given = environment.get(SOURCE_VARIABLE)
    if not given:
        archive = cached_archive(pin, cache_dir(environment))
        names = unpack_archive(archive, into)
        _check_tree(pin, into, names, archive)
        return
    path = Path(given).expanduser().absolute()
    if path.is_dir():
        version = folder_version(path)
        if version != pin.version:
            raise WrongVersionError(
                f"{SOURCE_VARIABLE}={path}: expected {pin.name} {pin.version}, found {version}; "
                "give a folder with the expected version, or unset the variable to have it fetched"
            )
        _check_tree(pin, into, copy_folder(path, into), path)
    elif path.is_file():
        check_archive(pin, path)
        _check_tree(pin, into, unpack_archive(path, into), path)
    else:
        raise SourceError(
            f"{SOURCE_VARIABLE}={path}: neither a file nor a folder; give the path of the "
            f"{pin.name} {pin.version} source distribution, or unset the variable"
        )


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder that keeps downloaded archives.

    Args:
        environment: Environment variables.

    Returns:
        The folder that the user names, or one in the user's cache folder.

    Raises:
        DependencyError: The package `platformdirs` is not installed and no folder is named.
    """
    named = environment.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    try:
        from platformdirs import user_cache_path
    except ImportError as error:
        raise DependencyError(
            f"the place of the cache comes from the package platformdirs ({error}); "
            f"`python -m pip install platformdirs`, or set {CACHE_VARIABLE} to a folder"
        ) from error
    return user_cache_path("flash-attn-deterministic", appauthor=False)


def cached_archive(pin: Pin, cache: Path, fetch: Download | None = None) -> Path:
    """Return the pinned archive from the cache, fetching it if it isn't there, or is damaged.

    Builds that run at the same time may both fetch; each moves a complete archive into place.

    Args:
        pin: What to return.
        cache: Folder; made if need be.
        fetch: Writes the archive to a file; None: from the user's package sources.

    Returns:
        Path of the archive, whose sha256 has been checked.

    Raises:
        HashMismatchError: What was fetched is not the pinned archive.
        BuildError: Fetching or writing failed; see `errors`.
    """
    advice = f"set {CACHE_VARIABLE} to a folder with room that you may write to"
    entry = cache / f"{pin.sha256}.tar.gz"
    with disk_errors(entry, advice):
        if entry.is_file():
            if sha256_of(entry) == pin.sha256:
                return entry
            print(f"warning: {entry}: damaged; fetching it again", file=sys.stderr)
    with disk_errors(cache, advice):
        cache.mkdir(parents=True, exist_ok=True)
    with disk_errors(entry, advice), replacing(entry) as (handle, temporary):
        with os.fdopen(handle, "wb") as out:
            if fetch is None:
                download(pin, read_pip_settings(), out, entry)
            else:
                fetch(pin, out, entry)
        # Once more from the disk: what is kept is what was checked.
        check_archive(pin, temporary)
    return entry


def check_archive(pin: Pin, archive: Path) -> None:
    """Check an archive's bytes, before anything reads into it.

    Args:
        pin: What the archive must be.
        archive: The file.

    Raises:
        HashMismatchError: The bytes are not the pinned ones.
        SourceError: The file cannot be read.
    """
    try:
        found = sha256_of(archive)
    except OSError as error:
        raise SourceError(
            f"{archive}: cannot be read ({error.strerror}); give a readable file"
        ) from error
    if found != pin.sha256:
        raise HashMismatchError(
            f"{archive}: expected the source distribution of {pin.name} {pin.version} with sha256 "
            f"{pin.sha256}, found {found}; get that file from a source that you trust, or unset "
            f"{SOURCE_VARIABLE} to have it fetched"
        )


def _check_tree(pin: Pin, tree: Path, names: list[str], source: Path) -> None:
    found = layout.tree_sha256(tree, names)
    if found != pin.tree_sha256:
        raise ChangedFilesError(
            f"{source}: has the right version, {pin.version}, but files below "
            f"{', '.join(layout.FOLDERS)} or {layout.LICENCE} were changed, added or removed: "
            f"expected tree hash {pin.tree_sha256}, found {found} in {len(names)} files; unpack "
            f"the source distribution afresh, or unset {SOURCE_VARIABLE} to have it fetched"
        )
