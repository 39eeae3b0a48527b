"""The state of the source tree that a release is made from."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    """What git says of the source tree.

    Attributes:
        commit: The commit that is checked out; "" if there is none.
        tags: The tags of that commit.
        changes: Files that differ from the commit, or that it does not have.
        why: Why git says nothing; "" if it does.
    """

    commit: str = ""
    tags: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    why: str = ""


def read_tree(root: Path) -> Tree:
    """Asks git for the state of a source tree.

    Args:
        root: Its folder.

    Returns:
        The state.
    """
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        tags = _git(root, "tag", "--points-at", "HEAD").split()
        # Two letters of state, a space, the path.
        changes = _git(root, "status", "--porcelain", "-z").split("\0")
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        return Tree(why=words.strip().splitlines()[-1])
    return Tree(commit, tuple(sorted(tags)), tuple(line[3:] for line in changes if line))


def reasons(tree: Tree, version: str) -> Iterator[str]:
    """Holds a source tree to the version that is to be released from it.

    Args:
        tree: The source tree.
        version: Version of the wheel.

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


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout
