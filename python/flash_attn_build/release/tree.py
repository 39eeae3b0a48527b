"""The state of the source tree that a release is made from."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import first_of


def problems(root: Path, version: str, tag: str | None) -> Iterator[str]:
    """Compares a source tree with its commit, and its tag with the version.

    `tag`: the one that a workflow runs for, None by hand.
    """
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        tags = sorted(_git(root, "tag", "--points-at", "HEAD").split())
        changes = _changes(root, commit)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        yield f"tree: git does not know what is checked out ({words.strip().splitlines()[-1]})"
        return
    if f"v{version}" not in tags:
        found = f"it has {', '.join(tags)}" if tags else "it has no tag"
        yield f"tree: {commit[:12]} is not tagged v{version}: {found}"
    if tag is not None and tag != f"v{version}":
        yield f"tree: the release is of tag {tag}, but the wheel is of v{version}"
    if changes:
        yield f"tree: differs from its commit: {first_of(changes)}"


def _changes(root: Path, commit: str) -> list[str]:
    """Files whose bytes or mode are not those in the commit, new ones, and ways out of it.

    A checkout can be configured to skip changes (assume-unchanged, skip-worktree, a file system
    monitor, filters), to ignore new files (.git/info/exclude, or a .gitignore that ignores itself)
    and to look into another folder (core.worktree). So they are looked for with a repository of
    their own, that has the objects of this one and no configuration. New files are those that the
    .gitignore at the commit's root does not name.
    """
    asked = ("--show-object-format", "--path-format=absolute", "--git-path", "objects")
    form, objects = _git(root, "rev-parse", *asked).splitlines()
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            "HOME": folder, "XDG_CONFIG_HOME": folder, "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1", "GIT_DIR": f"{folder}/git",
            "GIT_WORK_TREE": str(root.absolute()), "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }  # fmt: skip
        _git(root, "init", "--quiet", "--template=", f"--object-format={form}", **environ)
        # Bytes are compared as they are, whatever .gitattributes says.
        attributes = Path(folder, "git", "info", "attributes")
        attributes.parent.mkdir(exist_ok=True)
        attributes.write_text("* -text -filter -ident -working-tree-encoding\n")
        _git(root, "read-tree", commit, **environ)
        changed = _git(root, "diff", "--no-ext-diff", "--name-only", "-z", **environ)
        rules = Path(folder, "rules")
        rules.touch()
        if _git(root, "ls-files", ".gitignore", **environ):
            rules.write_text(_git(root, "show", f"{commit}:.gitignore", **environ))
        new = _git(root, "ls-files", "--others", f"--exclude-from={rules}", "-z", **environ)
        staged = _git(root, "ls-files", "--stage", "-z", **environ).split("\0")[:-1]
    modes = {line.partition("\t")[2]: line[:6] for line in staged}
    known = {above for name in modes for above in (Path(name), *Path(name).parents)}
    found = [name for name in (changed + new).split("\0") if name]
    for name, mode in modes.items():
        to = Path(name).parent / (os.readlink(root / name) if mode == "120000" else "")
        if mode == "160000" or Path(os.path.normpath(to)) not in known:
            found.append(f"{name} (a submodule, or a link to what is not in it)")
    return found


def _git(root: Path, *arguments: str, **variables: str) -> str:
    # Variables may name another repository, or another index.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), "--no-replace-objects", *arguments]
    environ = {**kept, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
