"""Upstream's used files, checked: from a given archive or folder, the cache, or the network."""

from __future__ import annotations

import os
import sys
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ..errors import RefusedError, SettingError, ToolchainError
from ..files import read_tree, replacing, sha256_of, tree_sha256
from .fetch import download
from .pin import Pin

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


def read_sources(pin: Pin, environ: Mapping[str, str]) -> dict[str, bytes]:
    """Reads upstream's used files, from wherever the user says, and checks them.

    Args:
        pin: What the sources must be.
        environ: FLASH_ATTENTION_SOURCE: archive or folder; FLASH_ATTENTION_CACHE: where fetched
            archives are kept.

    Returns:
        Content by path in a prepared tree.
    """
    path = Path(environ.get(SOURCE_VARIABLE, "")).expanduser().absolute()
    given = bool(environ.get(SOURCE_VARIABLE)) and path.is_dir()
    try:
        files = read_folder(path) if given else read_archive(find_archive(pin, environ))
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise RefusedError(
            f"{SOURCE_VARIABLE}={path}: cannot be read ({error}); give the source distribution of "
            f"{pin.name} {pin.version}, or the folder that holds its PKG-INFO"
        ) from error
    if (found := tree_sha256(files)) != pin.tree_sha256:
        raise RefusedError(
            f"{path}: is not {pin.name} {pin.version}, or files below {', '.join(FOLDERS)} or "
            f"LICENSE were changed, added or removed: expected tree hash {pin.tree_sha256}, found "
            f"{found}; unpack it afresh, or unset {SOURCE_VARIABLE} to have it fetched"
        )
    return files


def find_archive(pin: Pin, environ: Mapping[str, str]) -> Path:
    """The pinned archive: the one that is given, or that of the cache, fetched if need be.

    Builds that run at the same time may both fetch; each moves a complete archive into place.
    """
    if given := environ.get(SOURCE_VARIABLE):
        path = Path(given).expanduser().absolute()
        if not path.is_file():
            raise SettingError(f"{SOURCE_VARIABLE}={path}: expected an archive or a folder")
        check_archive(pin, path)
        return path
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "flash-attn-deterministic")
    cache = Path(environ.get(CACHE_VARIABLE) or caches).expanduser().absolute()
    path = cache / f"{pin.sha256}.tar.gz"
    try:
        if path.is_file():
            if sha256_of(path) == pin.sha256:
                return path
            print(f"warning: {path}: damaged; fetching it again", file=sys.stderr)
        with replacing(path) as out:
            download(pin, out)
            out.flush()
            # Once more from the disk: what is kept is what was checked.
            check_archive(pin, Path(os.fsdecode(out.name)))
    except OSError as error:
        raise ToolchainError(
            f"{path}: cannot be written ({error.strerror}); free some space, or set "
            f"{CACHE_VARIABLE} to a folder with room that you may write to"
        ) from error
    return path


def check_archive(pin: Pin, archive: Path) -> None:
    """Checks an archive's bytes, before anything reads into it."""
    if (found := sha256_of(archive)) != pin.sha256:
        raise RefusedError(
            f"{archive}: expected the source distribution of {pin.name} {pin.version} with sha256 "
            f"{pin.sha256}, found {found}; get that file from a source that you trust, or unset "
            f"{SOURCE_VARIABLE} to have it fetched"
        )


def read_archive(archive: Path) -> dict[str, bytes]:
    """Reads the used files of a source distribution. Nothing is unpacked, so nothing can leave."""
    files: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            target = placed("/".join(PurePosixPath(member.name).parts[1:]))
            if target is None:
                continue
            file = tar.extractfile(member) if member.isreg() else None
            if file is None or target in files:
                raise RefusedError(f"{archive}: {member.name!r} is a link, or there twice")
            files[target] = file.read()
    return files


def read_folder(folder: Path) -> dict[str, bytes]:
    """Reads the used files of an unpacked source distribution, or of a checkout."""
    found = read_tree(folder, [*FOLDERS, "LICENSE"])
    return {target: data for name, data in found.items() if (target := placed(name))}


def placed(name: str) -> str | None:
    """Where a file of upstream's tree goes in a prepared one; None: it is not used."""
    if name == "LICENSE":
        return LICENCE
    path = PurePosixPath(name)
    if path.suffix in _SUFFIXES and ".." not in path.parts:
        for source, target in FOLDERS.items():
            if name.startswith(f"{source}/"):
                return target + name[len(source) :]
    return None
