"""The state of the source tree that a release is made from."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    """What a checkout holds, beside what its commit says.

    Attributes:
        commit: The commit that is checked out; "" if there is none.
        tags: The tags of that commit.
        changes: Files that differ from the commit, or that it does not have.
        why: Why git does not tell; "" if it does.
    """

    commit: str = ""
    tags: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    why: str = ""


def read_tree(root: Path) -> Tree:
    """Compares a source tree with its commit, file by file.

    `git status` believes its index, which can be told to pass over changes (assume-unchanged,
    skip-worktree, a file system monitor), to ignore new files (.git/info/exclude, or a .gitignore
    that ignores itself) and to look into another folder (core.worktree). So the bytes of every file
    are hashed here, and compared with the commit's blobs; new files are those that the .gitignore
    at the commit's root does not name.

    Args:
        root: The tree's folder.

    Returns:
        The state.
    """
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        tags = _git(root, "tag", "--points-at", "HEAD").split()
        form = _git(root, "rev-parse", "--show-object-format").strip()
        changes = [
            name for name, (mode, blob) in _blobs(root).items()
            if _state(root / name, form) != (mode, blob)
        ]  # fmt: skip
        changes += _new_files(root)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        return Tree(why=words.strip().splitlines()[-1])
    return Tree(commit, tuple(sorted(tags)), tuple(changes))


def reasons(tree: Tree, version: str) -> Iterator[str]:
    """Holds a source tree to the version that is to be released from it.

    Args:
        tree: The source tree.
        version: Version of the wheel, without a local part.

    Yields:
        Every reason against a release from this tree.
    """
    if tree.why:
        yield f"tree: git does not know what is checked out ({tree.why})"
        return
    if f"v{version}" not in tree.tags:
        found = f"it has {', '.join(tree.tags)}" if tree.tags else "it has no tag"
        yield f"tree: {tree.commit[:12]} is not tagged v{version}: {found}"
    if tree.changes:
        some = ", ".join(tree.changes[:3])
        more = f" and {len(tree.changes) - 3} more" if len(tree.changes) > 3 else ""
        yield f"tree: differs from its commit: {some}{more}"


def _new_files(root: Path) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".gitignore") as rules:
        if ".gitignore" in _git(root, "ls-tree", "--name-only", "HEAD").split("\n"):
            rules.write(_git(root, "show", "HEAD:.gitignore"))
        rules.flush()
        found = _git(root, "ls-files", "--others", f"--exclude-from={rules.name}", "-z")
    return [name for name in found.split("\0") if name]


def _blobs(root: Path) -> dict[str, tuple[str, str]]:
    """Mode and object name of every file in the commit."""
    found = {}
    for line in filter(None, _git(root, "ls-tree", "-r", "-z", "--full-tree", "HEAD").split("\0")):
        about, _, name = line.partition("\t")
        mode, _, blob = about.split()
        found[name] = (mode, blob)
    return found


def _state(path: Path, form: str) -> tuple[str, str]:
    """What git would call a file's bytes and mode."""
    if path.is_symlink():
        mode, data = "120000", os.readlink(path).encode()
    elif path.is_file():
        mode, data = ("100755" if os.access(path, os.X_OK) else "100644"), path.read_bytes()
    else:
        return "", ""
    return mode, hashlib.new(form, b"blob %d\0" % len(data) + data).hexdigest()


def _git(root: Path, *arguments: str) -> str:
    # Variables may name another repository, or another index.
    environ = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), f"--work-tree={root.absolute()}", "--no-replace-objects"]
    command += ["-c", "core.fsmonitor=false"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=True, env=environ
    ).stdout
