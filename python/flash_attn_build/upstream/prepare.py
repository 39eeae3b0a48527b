"""Prepares upstream's sources for the build: checked, patched, with licences, in one folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BuildError, RefusedError
from ..files import read_tree, replacing_folder, sha256_of, tree_sha256, write_json
from .pin import REFRESH, Pin, found_patches
from .source import find_archive, read_archive

# Holds the hash of the tree as it was made, so that one that was edited since is not replaced.
STAMP = ".tree_sha256"
# The source distribution lacks CUTLASS's licence file, which binaries have to carry; but each of
# its headers opens with the text.
CUTLASS_LICENCE = "licenses/CUTLASS-LICENSE.txt"
CUTLASS_HEADER = "cutlass/include/cutlass/cutlass.h"
_BSD_3_CLAUSE = (
    r"Copyright \(c\).* SPDX-License-Identifier: BSD-3-Clause .*Redistributions of source code .*"
    r"Redistributions in binary form .*Neither the name .*POSSIBILITY OF SUCH DAMAGE\."
)


def prepare(
    dest: Path, pin: Pin, *, patched: bool = True, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Makes `dest` hold upstream's used files, patched or not, and the licence texts.

    The tree is made beside `dest` and moved there as a whole. Nothing is touched, times included,
    when `dest` already holds what would be made.

    Returns:
        Version, sha256, patches and destination, ready for JSON.

    Raises:
        RefusedError: A patch does not apply, or its result or the sources are not the pinned ones.
        BuildError: The sources cannot be had, or `dest` cannot be written, holds files that were
            not made here, or was edited since.
    """
    dest = dest.absolute()
    patches = pin.patch_files() if patched else []
    wanted = pin.patched_tree_sha256 if patched else pin.tree_sha256
    try:
        if not _holds(dest, wanted):
            with replacing_folder(dest) as tree:
                if (found := _make(tree, pin, patches, environ)) != wanted:
                    raise RefusedError(
                        f"{pin.path}: expected a tree of sha256 {wanted}, but release and "
                        f"patches make {found}; look at what they change, then {REFRESH}"
                    )
    except OSError as error:
        raise BuildError(
            f"{dest}: cannot be written ({error.strerror}); free some space, or choose another "
            "destination"
        ) from error
    listed = [{"name": path.name, "sha256": pin.patches[path.name]} for path in patches]
    return {"version": pin.version, "sha256": pin.sha256, "patches": listed, "dest": str(dest)}


def refresh(pin: Pin, environ: Mapping[str, str] = os.environ) -> None:
    """Writes what follows from the archive and the patches as they are now to the data file."""
    patches = found_patches(pin.path)
    with tempfile.TemporaryDirectory() as work:
        changes: dict[str, Any] = {
            "tree_sha256": _make(Path(work, "tree"), pin, [], environ),
            "patched_tree_sha256": _make(Path(work, "patched"), pin, patches, environ),
        }
    changes["patches"] = [{"name": path.name, "sha256": sha256_of(path)} for path in patches]
    write_json(pin.path, {**json.loads(pin.path.read_bytes()), **changes})


def _make(tree: Path, pin: Pin, patches: list[Path], environ: Mapping[str, str]) -> str:
    """Makes a tree; returns the hash of upstream's files in it, after the patches."""
    for name, data in read_archive(find_archive(pin, environ)).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    licence = cutlass_licence((tree / CUTLASS_HEADER).read_text(encoding="utf-8"))
    for patch in patches:
        _apply(patch, pin, tree)
    found = tree_sha256(_files(tree))
    (tree / CUTLASS_LICENCE).write_text(licence, encoding="utf-8")
    (tree / STAMP).write_text(tree_sha256(_files(tree)) + "\n", encoding="utf-8")
    return found


def cutlass_licence(header: str) -> str:
    """The licence text in the comment that opens a CUTLASS header, without comment marks."""
    opening = header.partition("*/")[0] if header.startswith("/*") else ""
    # The first and last line are rows of stars.
    lines = [line.strip().removeprefix("*").strip() for line in opening.splitlines()[1:]]
    text = "\n".join(lines).strip(" *\n") + "\n"
    if not re.match(_BSD_3_CLAUSE, " ".join(text.split())):
        raise RefusedError(
            f"{CUTLASS_HEADER}: does not open with the BSD-3-Clause text; find where CUTLASS now "
            "states its licence, and adapt this module"
        )
    return text


def _apply(patch: Path, pin: Pin, tree: Path) -> None:
    """Applies a patch with git. Where git finds a place that fits worse, the tree's hash tells."""
    intro = patch.read_text(encoding="utf-8").partition("\n--- ")[0]
    if f"{pin.name} {pin.version}" not in " ".join(intro.split()):
        raise RefusedError(
            f"{patch.name}: the opening text does not name {pin.name} {pin.version}; check the "
            "patch against that release, then say so there"
        )
    if not shutil.which("git"):
        raise BuildError("git: not on PATH; it applies the patches. Install it")
    # A checkout around the tree would make git leave out files outside of it.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environ |= {"GIT_CEILING_DIRECTORIES": str(tree.parent), "LC_ALL": "C"}
    command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", str(patch)]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(
            f"{patch.name}: does not apply: {' '.join(done.stderr.split())}; the patch was made "
            "for other sources: check the pin, or make the patch again"
        )


def _holds(dest: Path, wanted: str) -> bool:
    """Returns whether `dest` is up to date; raises if it must not be replaced."""
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return False
    stamp = dest / STAMP
    held = _files(dest) if stamp.is_file() else {}
    if not held or stamp.read_text(encoding="utf-8").strip() != tree_sha256(held):
        raise BuildError(
            f"{dest}: was not made by this tool, or edited since; save your changes as a patch, "
            "then delete it, or choose another destination"
        )
    held.pop(CUTLASS_LICENCE)
    return tree_sha256(held) == wanted


def _files(tree: Path) -> dict[str, bytes]:
    return {name: data for name, data in read_tree(tree).items() if name != STAMP}
