from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import release_samples
from flash_attn_build import verification_folder
from flash_attn_build.errors import StepError
from flash_attn_build.verification_folder import make

ROOT = Path(__file__).resolve().parents[2]


def test_each_run_has_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dist" / "verification"
    assert [make(folder).name for _ in range(3)] == ["1", "2", "3"]
    assert [path.name for path in folder.iterdir() if list(path.iterdir())] == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "verification.json").write_text("{}")
    (tmp_path / "verification.json").write_text("{}")  # as it lay before runs had folders
    assert make(tmp_path).name == "10"
    assert (tmp_path / "9" / "verification.json").exists()


def test_a_run_that_starts_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, meanwhile = Path.mkdir, [True]

    def mkdir(path: Path, *arguments: object, **options: bool) -> None:
        if path.name == "1" and meanwhile.pop():
            real(path)
        real(path, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert make(tmp_path).name == "2"


def test_a_failure_outlives_a_second_run_that_passes(tmp_path: Path) -> None:
    made = release_samples.wheel(tmp_path / "wheel")
    project = release_samples.make(tmp_path / "project", made)
    project.edit_report(lambda r: r.update(status="failed"))
    second = make(project.dist / "verification") / "verification.json"
    release_samples.write_report(project.wheel, second)
    assert "1/verification.json: its status is 'failed'" in project.reasons()


def test_the_sessions_write_there(tmp_path: Path) -> None:
    """nox -s verify and verify_dev."""
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    commands = []

    class Session:
        def install(self, *words: str) -> None: ...

        def run(self, *words: str, **options: Any) -> str:
            commands.append(words)
            if words[0] != "python":
                return ""
            environ = {**os.environ, **options["env"]}
            return subprocess.check_output([sys.executable, *words[1:]], text=True, env=environ)

    for _ in range(2):
        noxfile.run_verify(Session(), tmp_path / "a.whl")
    outs = [Path(words[words.index("--out") + 1]) for words in commands if "--out" in words]
    assert outs == [tmp_path / "verification" / name for name in ("1", "2")]


def test_the_command_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verification_folder.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / '1'}\n"
    (tmp_path / "file").write_text("")
    assert verification_folder.main([str(tmp_path / "file")]) == StepError.exit_code
    assert "error: " in capsys.readouterr().err
