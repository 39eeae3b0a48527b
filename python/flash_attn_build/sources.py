"""What the machine code of a wheel is compiled from, as hashes of the source tree's files.

The build puts them into the wheel (cmake/BuildInfo.cmake), and the gate holds them to the tree
that is released: a commit and a clean tree say nothing of what lay there when the wheel was built.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Kernels, ops, patches, and the tools that fetch and patch upstream's part of them.
NATIVE = (
    "CMakeLists.txt",
    "CMakePresets.json",
    "cmake",
    "cpp",
    "python/flash_attn_build/upstream",
)
# The versions of linker and headers, and the options of the build backend and of cibuildwheel.
PARTS = (*NATIVE, "pyproject.toml")


def digests(root: Path = ROOT) -> dict[str, str]:
    """Hashes each part of a source tree that decides on machine code.

    Args:
        root: The source tree.

    Returns:
        Part to hexadecimal sha256, over each of its files in the order of names: path relative to
        the tree, NUL, size, NUL, bytes. The folder that the tree lies in has no part in it.

    Raises:
        FileNotFoundError: The tree lacks a part.
    """
    return {part: _digest(root, part) for part in PARTS}


def _digest(root: Path, part: str) -> str:
    at = root / part
    found = [at] if at.is_file() else [path for path in at.rglob("*") if path.is_file()]
    named = {
        path.relative_to(root).as_posix(): path
        for path in found
        if "__pycache__" not in path.parts  # Python's own, different on each machine
    }
    if not named:
        raise FileNotFoundError(2, "no such part of the source tree", part)
    total = hashlib.sha256()
    for name, path in sorted(named.items()):
        data = path.read_bytes()
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()


def main() -> int:
    """Prints the hashes of this source tree as JSON.

    Returns:
        Exit status.
    """
    try:
        print(json.dumps(digests()))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
