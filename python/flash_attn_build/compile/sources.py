"""What the machine code of a wheel is compiled from, as hashes of the source tree's files.

The build puts them into the wheel (cmake/BuildInfo.cmake), and the gate compares them with
the tree that is released: a clean tree today does not show what was there when the wheel was built.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..errors import exit_status
from ..files import ROOT, read_tree, tree_sha256

# Kernels, ops and patches. The pin in cpp/ has the hash of upstream's patched files: the tools that
# fetch and patch them decide no byte.
NATIVE = ("CMakeLists.txt", "CMakePresets.json", "cmake", "cpp")
# The versions of linker and headers, and the options of the build backend.
PARTS = (*NATIVE, "pyproject.toml")


def digests(root: Path = ROOT) -> dict[str, str]:
    """Hashes each part that the machine code is made from; FileNotFoundError if one is missing."""
    return {part: tree_sha256(read_tree(root, [part])) for part in PARTS}


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print(json.dumps(digests()))))
