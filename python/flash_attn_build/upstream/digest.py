"""Hashes of files, without holding them in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO


class Sha256Writer:
    """Hashes and counts what is written through it.

    Args:
        out: Binary file, open for writing.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Write bytes.

        Args:
            data: The bytes.
        """
        self._out.write(data)
        self._digest.update(data)
        self.size += len(data)

    def hexdigest(self) -> str:
        """Return the sha256 of all bytes so far, in hexadecimal."""
        return self._digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Hash a file.

    Args:
        path: The file.

    Returns:
        Hexadecimal sha256.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
