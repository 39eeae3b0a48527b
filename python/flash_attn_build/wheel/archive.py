"""The one way in which the files of a wheel become its bytes.

Members are stored, not compressed: zlib and zlib-ng, which distributions take for it, make other
bytes of one input. Kernels are compressed inside of the library.
"""

from __future__ import annotations

import base64
import hashlib
import io
import stat
import time
import zipfile
from collections.abc import Mapping

from ..errors import RefusedError

Date = tuple[int, int, int, int, int, int]


def date_of(epoch: int) -> Date:
    """The date that members bear for a SOURCE_DATE_EPOCH: archives hold even seconds, from 1980."""
    found = time.gmtime(max(epoch, 315532800) // 2 * 2)
    return (found.tm_year, found.tm_mon, found.tm_mday, found.tm_hour, found.tm_min, found.tm_sec)


def pack(contents: Mapping[str, bytes], date: Date) -> bytes:
    """Packs a wheel: plain files in a fixed order, last the .dist-info and its RECORD."""
    info = next((name.partition("/")[0] for name in contents if ".dist-info/" in name), "")
    record = f"{info}/RECORD"
    lines, out = [], io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:

        def add(name: str, data: bytes) -> None:
            item = zipfile.ZipInfo(name, date)
            item.create_system, item.external_attr = 3, (stat.S_IFREG | 0o644) << 16
            archive.writestr(item, data, zipfile.ZIP_STORED)

        for name in sorted(contents, key=lambda name: (".dist-info/" in name, name)):
            if name != record:
                digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest())
                lines.append(f"{name},sha256={digest.decode().rstrip('=')},{len(contents[name])}\n")
                add(name, contents[name])
        add(record, "".join([*lines, f"{record},,\n"]).encode())
    return out.getvalue()


def unpack(data: bytes) -> tuple[dict[str, bytes], Date]:
    """Reads a wheel that was packed here: content by name, RECORD included, and date.

    Refused is what `pack` would not make of the same files, to the byte: it may hold a file twice,
    links, modes, comments, or what other readers of archives see otherwise.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            items = archive.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED for item in items):
                raise RefusedError("archive: holds compressed files; the build stores them")
            contents = {item.filename: archive.read(item) for item in items}
            packed = pack(contents, items[0].date_time)
    # Readers of a damaged archive raise many kinds of errors.
    except (zipfile.BadZipFile, ValueError, LookupError, OSError, RuntimeError, EOFError) as error:
        raise RefusedError(f"archive: cannot be read ({error!r})") from error
    if packed != data:
        names = [item.filename for item in items]
        twice = sorted({name for name in names if names.count(name) > 1})
        at = next((i for i, (a, b) in enumerate(zip(data, packed, strict=False)) if a != b), -1)
        raise RefusedError(
            "archive: is not what the build makes of these files: "
            f"order, kind, mode, date or hash in RECORD of a file differs at byte {at}; "
            f"it has {len(data)} bytes, not {len(packed)}; holds twice: {twice}"
        )
    return contents, items[0].date_time
