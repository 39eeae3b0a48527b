"""Which of upstream's files are used, and where they go in a prepared tree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

FLASH_ATTENTION_LICENCE = "licenses/FlashAttention-LICENSE"
CUTLASS_LICENCE = "licenses/CUTLASS-LICENSE.txt"

FOLDERS = {
    "csrc/flash_attn/src": "flash_attn/src",
    "csrc/cutlass/include": "cutlass/include",
}
LICENCE = "LICENSE"

# Anything else in those folders (generators, editor backups, caches) is no input of the build.
_SUFFIXES = {".cu", ".cuh", ".h", ".hpp", ".inl"}


def placed(name: str) -> str | None:
    """Return where a file of upstream's tree goes.

    Args:
        name: POSIX path relative to upstream's root.

    Returns:
        POSIX path relative to the prepared tree; None if the file is not used.
    """
    if name == LICENCE:
        return FLASH_ATTENTION_LICENCE
    if PurePosixPath(name).suffix in _SUFFIXES:
        for source, target in FOLDERS.items():
            if name.startswith(f"{source}/"):
                return target + name[len(source) :]
    return None


def missing(names: Iterable[str]) -> list[str]:
    """Return the parts of upstream that a list of used files lacks altogether.

    Args:
        names: POSIX paths relative to upstream's root.

    Returns:
        Names of the missing folders and files.
    """
    found = set(names)
    lacking = [f for f in FOLDERS if not any(name.startswith(f"{f}/") for name in found)]
    return lacking + ([] if LICENCE in found else [LICENCE])


def tree_sha256(tree: Path, names: Iterable[str]) -> str:
    """Hash used files by name and content, whatever archive or folder they came from.

    Args:
        tree: The prepared, unpatched tree.
        names: The used files, as POSIX paths relative to upstream's root.

    Returns:
        Hexadecimal sha256 over, in name order, each name, a NUL, the size, a NUL, and the bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        target = placed(name)
        assert target is not None, name
        data = (tree / target).read_bytes()
        # Sizes keep bytes from moving between a file and its neighbour unnoticed.
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
