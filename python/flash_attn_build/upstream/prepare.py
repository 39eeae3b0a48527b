"""Prepare upstream's sources for the build: place, patch, add licences, stamp."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_attn_build.upstream import layout, stamp
from flash_attn_build.upstream.errors import DestinationError, PatchError
from flash_attn_build.upstream.licence import cutlass_licence
from flash_attn_build.upstream.patch import Patch, apply, parse
from flash_attn_build.upstream.pin import Pin, read_patches
from flash_attn_build.upstream.source import place_sources
from flash_attn_build.upstream.storage import disk_errors

_ADVICE = "choose another destination"


def prepare(
    dest: Path, pin: Pin, *, patched: bool = True, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Make `dest` hold upstream's used files, patched, and the licence texts.

    The tree is made beside `dest` and moved there as a whole. Nothing is touched, times included,
    when `dest` already holds what would be made.

    Args:
        dest: Folder; made if need be.
        pin: The pin.
        patched: False: upstream's files as they are.
        environment: Environment variables that say where the sources come from.

    Returns:
        Version, sha256, patches and destination, ready for JSON.

    Raises:
        DestinationError: `dest` holds files that were not made, or were edited since.
        PatchError: A patch does not apply.
        BuildError: The sources cannot be had or are not the pinned ones; see `errors`.
    """
    dest = dest.absolute()
    patches = read_patches(pin) if patched else []
    parsed = [parse(patch.name, data) for patch, data in patches]
    for patch in parsed:
        if f"{pin.name} {pin.version}" not in " ".join(patch.intro.split()):
            raise PatchError(
                f"{patch.name}: line 1: the opening text does not name {pin.name} {pin.version}; "
                "check the patch against that release, then say so there"
            )
    result = {
        "version": pin.version,
        "sha256": pin.sha256,
        "patches": [asdict(patch) for patch, _ in patches],
        "dest": str(dest),
    }
    key = stamp.key_of(pin, patched)
    if _holds(dest, key):
        return result
    with disk_errors(dest.parent, _ADVICE):
        dest.parent.mkdir(parents=True, exist_ok=True)
    with (
        disk_errors(dest, _ADVICE),
        tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as work,
    ):
        tree = Path(work, "new")
        tree.mkdir()
        place_sources(pin, tree, environment)
        (tree / layout.CUTLASS_LICENCE).write_text(cutlass_licence(tree), encoding="utf-8")
        for patch in parsed:
            _apply(patch, tree)
        stamp.write(stamp.make(key, tree), tree)
        if _holds(dest, key):  # made by another build in the meantime
            return result
        _swap(tree, dest, Path(work, "old"), key)
    return result


def _holds(dest: Path, key: str) -> bool:
    """Return whether `dest` is up to date; raise if it must not be replaced."""
    advice = "delete it, or choose another destination"
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return False
    found = stamp.read(dest) if dest.is_dir() else None
    if found is None:
        raise DestinationError(f"{dest}: exists and was not made by this tool; {advice}")
    edited = stamp.differences(found, dest)
    if edited:
        more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
        raise DestinationError(
            f"{dest}: edited since it was made: {', '.join(edited[:3])}{more}; save your changes "
            f"as a patch, then {advice}"
        )
    return found.key == key


def _apply(patch: Patch, tree: Path) -> None:
    folders = tuple(f"{folder}/" for folder in layout.FOLDERS.values())
    for path in patch.files:
        file = tree / path
        if not path.startswith(folders) or ".." in path.split("/") or not file.is_file():
            raise PatchError(
                f"{patch.name}: {path}: no such file in the prepared tree; paths are relative to "
                f"it and begin with {' or '.join(folders)}"
            )
        file.write_bytes(apply(patch, path, file.read_bytes()))


def _swap(tree: Path, dest: Path, old: Path, key: str) -> None:
    """Move the tree to `dest`, and what was there to `old`."""
    with suppress(FileNotFoundError):
        os.rename(dest, old)
    try:
        os.rename(tree, dest)
    except OSError as error:
        # Another build may have been faster; if it made the same, all is well.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and _holds(dest, key):
            return
        if old.exists() and not dest.exists():
            os.rename(old, dest)
        raise
