"""A project that is ready for release, of which each test gets a copy, and a `gh` of ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import release_samples
from release_samples import Project


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
    path, calls = tmp_path / "bin" / "gh", tmp_path / "calls"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    def put(program: str) -> Path:
        path.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{program}\n')
        path.chmod(0o755)
        return calls

    return put
