"""From a checked archive, or a folder, to a tree with the used files in their places."""

from __future__ import annotations

import email.parser
import os
import re
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from flash_attn_build.upstream import layout
from flash_attn_build.upstream.errors import SourceError, UnsafeArchiveError
from flash_attn_build.upstream.storage import disk_errors

_INIT_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_GIVE = "give the unpacked source distribution (the folder that holds PKG-INFO), or its archive"


def unpack_archive(archive: Path, into: Path) -> list[str]:
    """Unpack the used files of a source distribution.

    Only names and bytes are taken from the archive: no mode, owner, time or link. Every member
    is checked, used or not, because one bad member says that the archive is not what it seems.

    Args:
        archive: A tar archive with one folder at its top.
        into: Existing folder that receives the files.

    Returns:
        The used files, as POSIX paths relative to the archive's top folder.

    Raises:
        UnsafeArchiveError: A member is a link or device, leaves the folder, or comes twice.
        SourceError: The archive cannot be read or lacks upstream's sources.
        DiskFullError: The disk is full.
        NotWritableError: A file cannot be written.
    """
    names: list[str] = []
    roots: set[str] = set()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                root, name = _checked_name(archive, member, into)
                roots.add(root)
                target = layout.placed(name)
                if target is None or not member.isreg():
                    continue
                if name in names or len(roots) > 1:
                    raise _unsafe(archive, member, "comes twice, or beside another top folder")
                file = tar.extractfile(member)
                assert file is not None  # only links and devices have none
                names.append(name)
                _write(into / target, file.read())
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise SourceError(f"{archive}: is not a readable archive ({error}); {_GIVE}") from error
    return _complete(names, archive)


def copy_folder(folder: Path, into: Path) -> list[str]:
    """Copy the used files of an unpacked source distribution, or of a checkout.

    Args:
        folder: Upstream's root folder.
        into: Existing folder that receives the files.

    Returns:
        The used files, as POSIX paths relative to `folder`.

    Raises:
        SourceError: The folder cannot be read or lacks upstream's sources.
        DiskFullError: The disk is full.
        NotWritableError: A file cannot be written.
    """
    names: list[str] = []
    for start in (*layout.FOLDERS, layout.LICENCE):
        for path in _files(folder / start):
            name = path.relative_to(folder).as_posix()
            target = layout.placed(name)
            if target is None:
                continue
            try:
                content = path.read_bytes()
            except OSError as error:
                raise SourceError(f"{path}: cannot be read ({error.strerror}); {_GIVE}") from error
            _write(into / target, content)
            names.append(name)
    return _complete(names, folder)


def folder_version(folder: Path) -> str:
    """Return the version that a folder says it is.

    Args:
        folder: Upstream's root folder.

    Returns:
        Version from PKG-INFO, which a source distribution has, or from flash_attn/__init__.py.

    Raises:
        SourceError: Neither file says a version.
    """
    info, init = folder / "PKG-INFO", folder / "flash_attn" / "__init__.py"
    try:
        if info.is_file():
            headers = email.parser.Parser().parsestr(info.read_text(encoding="utf-8"), True)
            if headers["Version"]:
                return str(headers["Version"]).strip()
        if init.is_file() and (match := _INIT_VERSION.search(init.read_text(encoding="utf-8"))):
            return match[1]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{folder}: cannot be read ({error}); {_GIVE}") from error
    raise SourceError(f"{folder}: no version in PKG-INFO or flash_attn/__init__.py; {_GIVE}")


def _checked_name(archive: Path, member: tarfile.TarInfo, into: Path) -> tuple[str, str]:
    """Return the member's top folder and its path below that."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise _unsafe(archive, member, "leaves the folder it is unpacked into")
    if not (member.isreg() or member.isdir()):
        raise _unsafe(archive, member, "is a link or a device")
    data_filter = getattr(tarfile, "data_filter", None)  # absent before Python 3.10.12
    if data_filter is not None:
        try:
            data_filter(member, str(into))
        except tarfile.TarError as error:
            raise _unsafe(archive, member, str(error)) from error
    return path.parts[0] if path.parts else "", PurePosixPath(*path.parts[1:]).as_posix()


def _unsafe(archive: Path, member: tarfile.TarInfo, reason: str) -> UnsafeArchiveError:
    return UnsafeArchiveError(
        f"{archive}: {member.name!r} {reason}; delete the archive and get it from a source that "
        "you trust"
    )


def _files(start: Path) -> list[Path]:
    if start.is_file():
        return [start]
    return [Path(folder, name) for folder, _, names in os.walk(start) for name in names]


def _write(path: Path, content: bytes) -> None:
    with disk_errors(path, "choose another destination"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _complete(names: list[str], source: Path) -> list[str]:
    lacking = layout.missing(names)
    if lacking:
        raise SourceError(f"{source}: lacks {', '.join(lacking)}; {_GIVE}")
    return sorted(names)
