"""Upstream's used files, checked: from an archive that is given, the cache, or the network."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ..errors import BuildError, RefusedError
from ..files import sha256_of, write_bytes
from .pin import Pin

SOURCE_VARIABLE = "FLASH_ATTENTION_SOURCE"
# What of upstream's tree is used, and where it lies in a prepared one.
FOLDERS = {
    "csrc/flash_attn/src": "flash_attn/src",
    "csrc/cutlass/include": "cutlass/include",
}
LICENCE = "licenses/FlashAttention-LICENSE"
# Anything else in those folders is no input of the build.
_SUFFIXES = {".cu", ".cuh", ".h", ".hpp", ".inl"}


def find_archive(pin: Pin, environ: Mapping[str, str]) -> Path:
    """The pinned archive: FLASH_ATTENTION_SOURCE, or that of the cache, fetched if need be.

    Builds that run at the same time may both fetch; each moves a complete archive into place.
    """
    if given := environ.get(SOURCE_VARIABLE):
        path = Path(given).expanduser().absolute()
        if not path.is_file():
            raise BuildError(f"{SOURCE_VARIABLE}={path}: expected an archive, there is none")
        if (found := sha256_of(path)) != pin.sha256:
            raise RefusedError(
                f"{path}: expected the source distribution of {pin.name} {pin.version} with sha256 "
                f"{pin.sha256}, found {found}; get that file from a source that you trust, or "
                f"unset {SOURCE_VARIABLE} to have it fetched"
            )
        return path
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "flash-attn-deterministic")
    path = (cache / f"{pin.sha256}.tar.gz").expanduser().absolute()
    try:
        if path.is_file() and sha256_of(path) == pin.sha256:
            return path
        if path.exists():
            print(f"warning: {path}: damaged; fetching it again", file=sys.stderr)
        from . import fetch  # what is there already needs no unearth

        with tempfile.TemporaryDirectory() as folder:
            write_bytes(path, fetch.download(pin, Path(folder)).read_bytes())
    except ImportError as error:
        raise BuildError(f"{error}: `python -m pip install unearth`") from error
    except OSError as error:
        raise BuildError(
            f"{path}: cannot be written ({error.strerror}); free some space, or set "
            "XDG_CACHE_HOME to a folder with room that you may write to"
        ) from error
    return path


def read_archive(archive: Path) -> dict[str, bytes]:
    """Reads the used files, by their names in a prepared tree. Nothing is unpacked."""
    files: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = "/".join(PurePosixPath(member.name).parts[1:])
            if (target := placed(name)) is None:
                continue
            file = tar.extractfile(member) if member.isreg() else None
            if file is None or target in files:
                raise RefusedError(f"{archive}: {member.name!r} is a link, or there twice")
            files[target] = file.read()
    return files


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
