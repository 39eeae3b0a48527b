"""A project that is ready for release, of which each test gets a copy, and a `gh` of ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import release_samples
from release_samples import Project
from stand_ins import program


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("intact")
    return release_samples.make(folder / "project", release_samples.wheel(folder / "wheel"))


@pytest.fixture
def project(intact: Project, tmp_path: Path) -> Project:
    root = tmp_path / "project"
    shutil.copytree(intact.root, root)
    return Project(root, root / "dist", root / "dist" / intact.wheel.name)


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a `gh` of a few lines of shell on PATH; the file returned lists how it was called."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def put(answer: str) -> Path:
        program(tmp_path / "bin" / "gh", f'echo "$@" >> {calls}\n{answer}')
        return calls

    return put
