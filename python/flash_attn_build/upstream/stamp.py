"""The stamp of a prepared tree: from what it was made, and the hash of each file in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flash_attn_build.upstream.digest import sha256_of
from flash_attn_build.upstream.pin import Pin

NAME = ".prepared.json"
# Raise it when the same pin and patches would give another tree.
FORMAT = 1


@dataclass(frozen=True)
class Stamp:
    """Content of the stamp file.

    Args:
        key: Hash over everything that the tree is made from.
        files: sha256 by POSIX path relative to the tree.
    """

    key: str
    files: dict[str, str]


def key_of(pin: Pin, patched: bool) -> str:
    """Hash everything that a tree is made from.

    Args:
        pin: The pin.
        patched: Whether the patches are applied.

    Returns:
        Hexadecimal sha256.
    """
    inputs: dict[str, Any] = {
        "format": FORMAT,
        "name": pin.name,
        "version": pin.version,
        "tree_sha256": pin.tree_sha256,
        "patches": [asdict(patch) for patch in pin.patches] if patched else None,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def make(key: str, tree: Path) -> Stamp:
    """Describe a tree as it is.

    Args:
        key: See `key_of`.
        tree: The tree.

    Returns:
        The stamp, which the tree does not hold yet.
    """
    files = sorted(path for path in tree.rglob("*") if path.is_file() and path != tree / NAME)
    return Stamp(key, {path.relative_to(tree).as_posix(): sha256_of(path) for path in files})


def write(stamp: Stamp, tree: Path) -> None:
    """Write a stamp into its tree.

    Args:
        stamp: The stamp.
        tree: The tree.
    """
    (tree / NAME).write_text(json.dumps(asdict(stamp), indent=0) + "\n", encoding="utf-8")


def read(tree: Path) -> Stamp | None:
    """Read a tree's stamp.

    Args:
        tree: The tree.

    Returns:
        The stamp; None if there is none that can be read.
    """
    try:
        data = json.loads((tree / NAME).read_bytes())
        return Stamp(str(data["key"]), {str(k): str(v) for k, v in data["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def differences(stamp: Stamp, tree: Path) -> list[str]:
    """Name the files of a tree that are not as its stamp says.

    Args:
        stamp: The tree's stamp.
        tree: The tree.

    Returns:
        POSIX paths of changed, added and removed files.
    """
    found = make(stamp.key, tree).files
    return sorted(
        name
        for name in stamp.files.keys() | found.keys()
        if stamp.files.get(name) != found.get(name)
    )
