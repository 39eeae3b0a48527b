"""Makes of a release's wheel one that holds its PTX alone, for a run on a GPU that is newer.

The driver compiles PTX only where a library holds no machine code for its GPU. The PTX stays to the
byte. A fat binary without any, of kernels for one generation alone, gets that of another one, so
that it can be loaded; `verify` sets FLASH_ATTENTION_FAMILY=sm80, so that none of these is called.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from ..errors import RefusedError
from . import archive, cubins
from .check import BUILD_INFO, LIBRARY


def only_ptx(section: bytes) -> bytes:
    """Takes machine code out of a .nv_fatbin section; what follows stays where it is."""
    units = list(cubins.entries(section))
    ptx = [[each for name, each in held if name.endswith("-virtual")] for _, held in units]
    some = min((each for kept in ptx for each in kept), key=len, default=b"")
    if not some:
        raise RefusedError("the wheel holds no PTX: build it with the preset release")
    out = bytearray(len(section))
    for (offset, held), kept in zip(units, ptx, strict=True):
        body = b"".join(kept or [some])
        if len(body) > sum(len(each) for _, each in held):
            raise RefusedError(f".nv_fatbin at byte {offset}: no room for {len(body)} bytes of PTX")
        made = cubins.header(len(body)) + body
        out[offset : offset + len(made)] = made
    return bytes(out)


def convert(wheel: Path, folder: Path) -> Path:
    """Writes the wheel of PTX, under the same name, into a folder; returns its path."""
    contents, date = archive.unpack(wheel.read_bytes())
    library, info = contents[LIBRARY], json.loads(contents[BUILD_INFO])
    section: Any = ELFFile(io.BytesIO(library)).get_section_by_name(".nv_fatbin")
    begin, data = section["sh_offset"], only_ptx(section.data())
    contents[LIBRARY] = library[:begin] + data + library[begin + len(data) :]
    info["architectures"] = sorted(cubins.architectures(data))
    info["instances"] = [each for each in info["instances"] if "family" not in each]
    contents[BUILD_INFO] = (json.dumps(info) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / wheel.name
    made.write_bytes(archive.pack(contents, date))
    return made
