"""Upstream's used files, checked: from a given archive or folder, the cache, or the network."""

from __future__ import annotations

import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..errors import DiskError, HashMismatchError, SourceError, StepError
from ..files import read_tree, replacing, sha256_of, tree_sha256
from .fetch import download
from .pin import Pin
from .pip_settings import read_pip_settings

SOURCE_VARIABLE = "FLASH_ATTENTION_SOURCE"
CACHE_VARIABLE = "FLASH_ATTENTION_CACHE"

# What of upstream's tree is used, and where it lies in a prepared one.
FOLDERS = {
    "csrc/flash_attn/src": "flash_attn/src",
    "csrc/cutlass/include": "cutlass/include",
}
LICENCE = "licenses/FlashAttention-LICENSE"
# Anything else in those folders (generators, editor backups, caches) is no input of the build.
_SUFFIXES = {".cu", ".cuh", ".h", ".hpp", ".inl"}
_GIVE = "give the unpacked source distribution (the folder that holds PKG-INFO), or its archive"

Download = Callable[[Pin, BinaryIO], None]


def read_sources(pin: Pin, environment: Mapping[str, str]) -> dict[str, bytes]:
    """Reads upstream's used files, from wherever the user says, and checks them.

    Args:
        pin: What the sources must be.
        environment: Environment variables; those named in this module are read.

    Returns:
        Content by path in a prepared tree.

    Raises:
        BuildError: The sources cannot be had or are not the pinned ones.
    """
    given = environment.get(SOURCE_VARIABLE)
    path = Path(given).expanduser().absolute() if given else None
    if path is None:
        path = cached_archive(pin, cache_dir(environment))
    elif path.is_file():
        check_archive(pin, path)
    elif not path.is_dir():
        raise SourceError(
            f"{SOURCE_VARIABLE}={path}: neither a file nor a folder; give the path of the "
            f"{pin.name} {pin.version} source distribution, or unset the variable"
        )
    files = read_folder(path) if path.is_dir() else read_archive(path)
    found = tree_sha256(files)
    if found != pin.tree_sha256:
        raise SourceError(
            f"{path}: is not {pin.name} {pin.version}, or files below {', '.join(FOLDERS)} or "
            f"LICENSE were changed, added or removed: expected tree hash {pin.tree_sha256}, found "
            f"{found} in {len(files)} files; unpack the source distribution afresh, or unset "
            f"{SOURCE_VARIABLE} to have it fetched"
        )
    return files


def read_archive(archive: Path) -> dict[str, bytes]:
    """Reads the used files of a source distribution. Nothing is unpacked, so nothing can leave.

    Args:
        archive: A tar archive with one folder at its top.

    Returns:
        Content by path in a prepared tree.

    Raises:
        SourceError: The archive cannot be read or lacks upstream's sources.
    """
    files = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                target = placed("/".join(PurePosixPath(member.name).parts[1:]))
                if target is None:
                    continue
                file = tar.extractfile(member) if member.isreg() else None
                if file is None or target in files:
                    raise SourceError(
                        f"{archive}: {member.name!r} is a link, or there twice; delete the archive "
                        "and get it from a source that you trust"
                    )
                files[target] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise SourceError(f"{archive}: is not a readable archive ({error}); {_GIVE}") from error
    return _complete(files, archive)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Reads the used files of an unpacked source distribution, or of a checkout.

    Args:
        folder: Upstream's root folder.

    Returns:
        Content by path in a prepared tree.

    Raises:
        SourceError: The folder cannot be read or lacks upstream's sources.
    """
    try:
        found = read_tree(folder, [*FOLDERS, "LICENSE"])
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read ({error}); {_GIVE}") from error
    named = ((placed(name), data) for name, data in found.items())
    return _complete({name: data for name, data in named if name}, folder)


def placed(name: str) -> str | None:
    """Tells where a file of upstream's tree goes.

    Args:
        name: POSIX path relative to upstream's root.

    Returns:
        POSIX path relative to the prepared tree; None if the file is not used.
    """
    if name == "LICENSE":
        return LICENCE
    path = PurePosixPath(name)
    if path.suffix in _SUFFIXES and ".." not in path.parts:
        for source, target in FOLDERS.items():
            if name.startswith(f"{source}/"):
                return target + name[len(source) :]
    return None


def _complete(files: dict[str, bytes], source: Path) -> dict[str, bytes]:
    for start in (*FOLDERS.values(), LICENCE):
        if not any(name.startswith(start) for name in files):
            raise SourceError(f"{source}: lacks what goes to {start}; {_GIVE}")
    return files


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Names the folder that keeps downloaded archives.

    Args:
        environment: Environment variables.

    Returns:
        The folder that the user names, or one in the user's cache folder.

    Raises:
        StepError: The package `platformdirs` is not installed and no folder is named.
    """
    named = environment.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    try:
        from platformdirs import user_cache_path
    except ImportError as error:
        raise StepError(
            f"the place of the cache comes from the package platformdirs ({error}); "
            f"`python -m pip install platformdirs`, or set {CACHE_VARIABLE} to a folder"
        ) from error
    return user_cache_path("flash-attn-deterministic", appauthor=False)


def cached_archive(pin: Pin, cache: Path, fetch: Download | None = None) -> Path:
    """Finds the pinned archive in the cache, or fetches it if it isn't there, or is damaged.

    Builds that run at the same time may both fetch; each moves a complete archive into place.

    Args:
        pin: What to return.
        cache: Folder; made if need be.
        fetch: Writes the archive to a file; None: from the user's package sources.

    Returns:
        Path of the archive, whose sha256 has been checked.

    Raises:
        HashMismatchError: What was fetched is not the pinned archive.
        DiskError: The cache cannot be written.
        BuildError: Fetching failed.
    """
    entry = cache / f"{pin.sha256}.tar.gz"
    try:
        if entry.is_file():
            if sha256_of(entry) == pin.sha256:
                return entry
            print(f"warning: {entry}: damaged; fetching it again", file=sys.stderr)
        with replacing(entry) as out:
            if fetch is None:
                download(pin, read_pip_settings(), out)
            else:
                fetch(pin, out)
            out.flush()
            # Once more from the disk: what is kept is what was checked.
            check_archive(pin, Path(os.fsdecode(out.name)))
    except OSError as error:
        raise DiskError(
            f"{entry}: cannot be written ({error.strerror}); free some space, or set "
            f"{CACHE_VARIABLE} to a folder with room that you may write to"
        ) from error
    return entry


def check_archive(pin: Pin, archive: Path) -> None:
    """Checks an archive's bytes, before anything reads into it.

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
