"""Reads which GPU code a library holds, from the fat binaries that nvcc puts into it.

cuobjdump would tell too, but gate and index run where no toolkit is, and no package of CUDA 13.0
or 12 has it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..errors import RefusedError

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, payload, ..., sm number
_MAGIC = 0xBA55ED50
_KINDS = {1: "virtual", 2: "real"}  # PTX, machine code


def architectures(section: bytes) -> set[str]:
    """Names the GPU code in a .nv_fatbin section as CMake does: "90-real", "90-virtual" (PTX)."""
    return {name for _, held in entries(section) for name, _ in held}


def entries(section: bytes) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Reads the fat binaries of a section, one for each translation unit.

    Returns:
        Where one begins, and its entries: name of the architecture, and all bytes of the entry.
    """
    offset = 0
    while offset + _CONTAINER.size <= len(section):
        magic, version, head, size = _CONTAINER.unpack_from(section, offset)
        if magic == 0:  # padding, in steps of the section's alignment
            offset += 8
            continue
        begin, end = offset, offset + head + size
        if magic != _MAGIC or version != 1 or end > len(section):
            raise RefusedError(
                f".nv_fatbin at byte {offset}: expected a fat binary, got magic {magic:#x}, "
                f"version {version}, {size} bytes. Has nvcc's format changed? Compare cuobjdump."
            )
        held, offset = [], offset + head
        while offset + _ENTRY.size <= end:
            kind, _, head, payload, sm = _ENTRY.unpack_from(section, offset)
            if kind not in _KINDS or not head:
                raise RefusedError(f".nv_fatbin at byte {offset}: unknown kind of entry {kind}")
            held.append((f"{sm}-{_KINDS[kind]}", section[offset : offset + head + payload]))
            offset += head + payload
        yield begin, held
        offset = end


def header(size: int) -> bytes:
    """What a fat binary begins with whose entries take so many bytes."""
    return _CONTAINER.pack(_MAGIC, 1, _CONTAINER.size, size)
