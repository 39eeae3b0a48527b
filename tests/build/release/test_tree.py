"""A release is of a tag, and of nothing but what is in it, whatever git is told not to see."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_wheel import VERSION
from flash_attn_build.files import write_text
from flash_attn_build.release.tree import problems
from release_samples import TAG, Project

HIDDEN = "python/flash_attn_deterministic/hidden.py"
EDIT = {"README.md": "sm_80"}
# Commands of git, then files that are written, and which of them is noticed.
CHANGES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "edited": ([], EDIT, "README.md"),
    "new": ([], {"new file": ""}, "new file"),
    "assume-unchanged": (["update-index --assume-unchanged README.md"], EDIT, "README.md"),
    "skip-worktree": (["update-index --skip-worktree README.md"], EDIT, "README.md"),
    "fsmonitor": (["config core.fsmonitor true"], EDIT, "README.md"),
    "excluded": ([], {".git/info/exclude": "hidden.py\n", HIDDEN: ""}, HIDDEN),
    "rules that ignore themselves": (
        [],
        {str(Path(HIDDEN).with_name(".gitignore")): "*\n", HIDDEN: ""},
        str(Path(HIDDEN).with_name(".gitignore")),
    ),
    "another folder named": (["config core.worktree ../docs"], {HIDDEN: ""}, HIDDEN),
}


def told(project: Project) -> str:
    return "\n".join(problems(project.root, VERSION))


@pytest.mark.parametrize(("commands", "files", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_tree_that_is_not_its_commit(
    project: Project, commands: list[str], files: dict[str, str], expected: str
) -> None:
    for command in commands:
        project.git(*command.split())
    for name, text in files.items():
        write_text(project.root / name, text)
    assert f"tree: differs from its commit: {expected}" in told(project)


def test_a_file_that_may_be_run_suddenly(project: Project) -> None:
    project.git("config", "core.fileMode", "false")
    (project.root / "CMakeLists.txt").chmod(0o755)
    assert "tree: differs from its commit: CMakeLists.txt" in told(project)


def test_the_tag_that_runs_is_the_versions(project: Project) -> None:
    """A second tag of the same commit does not verify the same version again."""
    project.git("tag", "v9")
    assert project.problems(TAG) == ""
    assert f"the release is of tag v9, but the wheel is of {TAG}" in project.problems("v9")


def test_another_tag_or_none(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.git("tag", "v0.0.2")
    project.git("tag", "--delete", TAG)
    assert f"is not tagged {TAG}: it has v0.0.2" in told(project)
    project.git("commit", "--quiet", "--allow-empty", "-m", "later")
    assert f"is not tagged {TAG}: it has no tag" in told(project)
    shutil.rmtree(project.root / ".git")
    assert told(project).startswith("tree: git does not know what is checked out")
    monkeypatch.setenv("PATH", str(project.dist))
    assert told(project).startswith("tree: git does not know what is checked out")
