"""The state of the source tree that a release is made from."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import first_of


def problems(root: Path, version: str, tag: str = "") -> Iterator[str]:
    """Compares a source tree with its commit, file by file, and its tag with the version.

    `git status` can be configured to skip changes (assume-unchanged, skip-worktree, a file system
    monitor, filters), to ignore new files (.git/info/exclude, or a .gitignore that ignores itself)
    and to look into another folder (core.worktree). So the bytes of every file are hashed here and
    compared with the commit's blobs. New files are those that the .gitignore at the commit's root
    does not name. `tag`: the one that a workflow runs for, "" by hand.
    """
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        tags = sorted(_git(root, "tag", "--points-at", "HEAD").split())
        changes = [*_changes(root)]
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        yield f"tree: git does not know what is checked out ({words.strip().splitlines()[-1]})"
        return
    if f"v{version}" not in tags:
        found = f"it has {', '.join(tags)}" if tags else "it has no tag"
        yield f"tree: {commit[:12]} is not tagged v{version}: {found}"
    if tag and tag != f"v{version}":
        yield f"tree: the release is of tag {tag}, but the wheel is of v{version}"
    if changes:
        yield f"tree: differs from its commit: {first_of(changes)}"


def _changes(root: Path) -> Iterator[str]:
    """Files whose bytes or mode are not those in the commit, and new ones."""
    form = _git(root, "rev-parse", "--show-object-format").strip()
    for line in filter(None, _git(root, "ls-tree", "-r", "-z", "--full-tree", "HEAD").split("\0")):
        about, _, name = line.partition("\t")
        mode, _, blob = about.split()
        if _state(root / name, form) != (mode, blob):
            yield name
    with tempfile.NamedTemporaryFile("w", suffix=".gitignore") as rules:
        if ".gitignore" in _git(root, "ls-tree", "--name-only", "HEAD").split("\n"):
            rules.write(_git(root, "show", "HEAD:.gitignore"))
        rules.flush()
        found = _git(root, "ls-files", "--others", f"--exclude-from={rules.name}", "-z")
    yield from filter(None, found.split("\0"))


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
