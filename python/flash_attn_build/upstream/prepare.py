"""Prepare upstream's sources for the build: checked, patched, with licences, in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import DestinationError, DiskError, PatchError
from ..files import read_tree, tree_sha256
from .licence import cutlass_licence
from .pin import REFRESH, Pin, found_patches, write_patches
from .source import read_sources

# Holds the hash of the tree as it was made, so that one that was edited since is not replaced.
STAMP = ".tree_sha256"
CUTLASS_LICENCE = "licenses/CUTLASS-LICENSE.txt"


def prepare(
    dest: Path, pin: Pin, *, patched: bool = True, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Makes `dest` hold upstream's used files, patched, and the licence texts.

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
        PatchError: A patch does not apply, or the patched files are not the pinned ones.
        DiskError: `dest` cannot be written.
        BuildError: The sources cannot be had or are not the pinned ones.
    """
    dest = dest.absolute()
    patches = pin.patch_files() if patched else []
    wanted = pin.patched_tree_sha256 if patched else pin.tree_sha256
    listed = [{"name": name, "sha256": sha256} for name, sha256 in pin.patches] if patched else []
    result = {"version": pin.version, "sha256": pin.sha256, "patches": listed, "dest": str(dest)}
    if _holds(dest, wanted):
        return result
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as work:
            tree = Path(work, "new")
            found = _make(tree, pin, patches, environment)
            if found != wanted:
                raise PatchError(
                    f"{pin.path}: patched_tree_sha256: expected {wanted}, but the patches make "
                    f"{found}; look at what they change (`git diff --no-index`), then {REFRESH}"
                )
            _swap(tree, dest, Path(work, "old"), wanted)
    except OSError as error:
        raise DiskError(
            f"{dest}: cannot be written ({error.strerror}); free some space, or choose another "
            "destination"
        ) from error
    return result


def refresh(pin: Pin, environment: Mapping[str, str] = os.environ) -> Pin:
    """Writes the patches as they are now, and what they make of upstream, to the data file.

    Args:
        pin: The pin, as loaded.
        environment: Environment variables that say where the sources come from.

    Returns:
        The pin that was given.

    Raises:
        PatchError: A patch does not apply.
        BuildError: The sources cannot be had or are not the pinned ones.
    """
    with tempfile.TemporaryDirectory() as work:
        found = _make(Path(work, "tree"), pin, found_patches(pin), environment)
    write_patches(pin, found)
    return pin


def _make(tree: Path, pin: Pin, patches: list[Path], environment: Mapping[str, str]) -> str:
    """Makes a tree; returns the hash of upstream's files in it, after the patches."""
    for name, data in read_sources(pin, environment).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    licence = cutlass_licence(tree)
    for patch in patches:
        _apply(patch, pin, tree)
    found = _upstream_sha256(tree)
    (tree / CUTLASS_LICENCE).write_text(licence, encoding="utf-8")
    (tree / STAMP).write_text(tree_sha256(_files(tree)) + "\n", encoding="utf-8")
    return found


def _apply(patch: Path, pin: Pin, tree: Path) -> None:
    """Applies a patch with git. Where git finds a place that fits worse, the tree's hash tells."""
    text = patch.read_text(encoding="utf-8")
    intro = " ".join(text.partition("\n--- ")[0].split())
    if f"{pin.name} {pin.version}" not in intro:
        raise PatchError(
            f"{patch.name}: the opening text does not name {pin.name} {pin.version}; check the "
            "patch against that release, then say so there"
        )
    git = shutil.which("git")
    if git is None:
        raise PatchError("git: not on PATH; it applies the patches. Install it")
    command = [git, "apply", "--unidiff-zero", "--whitespace=nowarn", str(patch)]
    # A checkout around the tree would make git leave out files outside of it.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environ |= {"GIT_CEILING_DIRECTORIES": str(tree.parent), "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PatchError(
            f"{patch.name}: does not apply: {' '.join(done.stderr.split())}; the patch was made "
            "for other sources: check the pin, or make the patch again"
        )


def _holds(dest: Path, wanted: str) -> bool:
    """Returns whether `dest` is up to date; raises if it must not be replaced.

    Another build may put a new tree there meanwhile. Then what was read may be of both trees, and
    is read again.
    """
    while True:
        before = _identity(dest)
        try:
            holds = _holds_now(dest, wanted)
        except (DestinationError, FileNotFoundError):
            if _identity(dest) == before:
                raise
        else:
            if _identity(dest) == before:
                return holds


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what differs between a folder and another one that is moved to its place."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_ctime_ns  # moving sets the time: an inode may be used again


def _holds_now(dest: Path, wanted: str) -> bool:
    advice = "delete it, or choose another destination"
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return False
    try:
        made = (dest / STAMP).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DestinationError(f"{dest}: exists and was not made by this tool; {advice}") from error
    if made != tree_sha256(_files(dest)):
        raise DestinationError(
            f"{dest}: edited since it was made; save your changes as a patch, then {advice}"
        )
    return _upstream_sha256(dest) == wanted


def _files(tree: Path) -> dict[str, bytes]:
    return {name: data for name, data in read_tree(tree).items() if name != STAMP}


def _upstream_sha256(tree: Path) -> str:
    return tree_sha256(
        {name: data for name, data in _files(tree).items() if name != CUTLASS_LICENCE}
    )


def _swap(tree: Path, dest: Path, old: Path, wanted: str) -> None:
    """Moves the tree to `dest`, and what was there to `old`."""
    with suppress(FileNotFoundError):
        os.rename(dest, old)
    try:
        os.rename(tree, dest)
    except OSError:
        # Another build may have been faster; if it made the same, all is well.
        if dest.exists() and _holds(dest, wanted):
            return
        if old.exists() and not dest.exists():
            os.rename(old, dest)
        raise
