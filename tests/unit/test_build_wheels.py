from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import release_samples
from flash_attn_build import files, manifest, surroundings, wheels
from flash_attn_build.errors import SettingError, StepError, WheelError
from flash_attn_build.gate.policy import load_policy

POLICY = load_policy()


class Images:
    """Stands in for cibuildwheel: puts a wheel where it is told to."""

    def __init__(self, wheel: Path, status: int = 0) -> None:
        self.wheel, self.status = wheel, status
        self.commands: list[list[str]] = []
        self.env: dict[str, str] = {}
        self._run = subprocess.run

    def __call__(self, command: Sequence[str], **options: Any) -> Any:
        if "cibuildwheel" not in command:
            return self._run(command, **options)
        self.commands.append(list(command))
        self.env = options["env"]
        if not self.status:
            out = Path(command[list(command).index("--output-dir") + 1])
            (out / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_samples.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def images(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    stand_in = Images(wheel)
    monkeypatch.setattr(subprocess, "run", stand_in)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in surroundings.given(os.environ):
        monkeypatch.delenv(name)
    return stand_in


def test_each_toolkit_has_its_image_and_folder(images: Images, wheel: Path, tmp_path: Path) -> None:
    for kit in POLICY.toolkits.values():
        made = wheels.build_wheel(kit, tmp_path)
        assert made == tmp_path / kit.label / wheel.name
        assert made.read_bytes() == wheel.read_bytes()
        command = images.commands[-1]
        assert command[command.index("--only") + 1] == kit.cibuildwheel
        assert sorted(path.name for path in made.parent.iterdir()) == [
            wheel.name,
            manifest.file_name(wheel.name),
        ]
    assert images.env["SOURCE_DATE_EPOCH"] == "1700000000"
    assert "PYTHONPATH" not in images.env


def test_the_manifest_is_one_that_the_gate_takes(images: Images, tmp_path: Path) -> None:
    made = wheels.build_wheel(POLICY.toolkits["13.0"], tmp_path)
    text = json.loads((made.parent / manifest.file_name(made.name)).read_text())
    assert text["schema"] == manifest.SCHEMA
    assert text["wheel"]["sha256"] == hashlib.sha256(made.read_bytes()).hexdigest()
    assert text["build"] == {
        "preset": "release",
        "defines": [],
        "environment": {},
        "source_date_epoch": 1700000000,
    }
    assert "cibuildwheel" in text["tools"]


def test_settings_of_cibuildwheel_that_are_not_the_projects_are_told(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CIBW_CONFIG_SETTINGS", "cmake.define.CMAKE_CUDA_FLAGS=-G")
    made = wheels.build_wheel(POLICY.toolkits["13.0"], tmp_path)
    text = json.loads((made.parent / manifest.file_name(made.name)).read_text())
    assert list(text["build"]["environment"]) == ["CIBW_CONFIG_SETTINGS"]


def test_a_full_disk(
    images: Images,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "x.whl")

    monkeypatch.setattr(files, "write_json", fail)
    assert wheels.main(["13.0", "--dist", str(tmp_path)]) == StepError.exit_code
    assert "error: [Errno 28] No space left on device: 'x.whl'" in capsys.readouterr().err
    assert list((tmp_path / "cu130").iterdir()) == []


def test_a_failed_build_leaves_nothing(images: Images, tmp_path: Path) -> None:
    images.status = 1
    with pytest.raises(StepError, match=r"cibuildwheel made no wheel \(exit status 1"):
        wheels.build_wheel(POLICY.toolkits["13.0"], tmp_path)
    assert list((tmp_path / "cu130").iterdir()) == []


def test_a_wheel_that_is_not_fit_leaves_nothing(images: Images, tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    images.wheel = tmp_path / "wrong" / "other-1.0-py3-none-any.whl"
    images.wheel.write_bytes(release_samples.wheel(tmp_path / "made").read_bytes())
    with pytest.raises(WheelError, match="name: expected"):
        wheels.build_wheel(POLICY.toolkits["13.0"], tmp_path)
    assert list((tmp_path / "cu130").iterdir()) == []


def test_an_unknown_toolkit(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main(["11.8"]) == SettingError.exit_code
    assert "toolkits: expected 12.8, 13.0, got '11.8'" in capsys.readouterr().err


def test_the_list_is_what_a_ci_takes_as_its_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    assert wheels.main(["--list"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == [
        {"series": "12.8", "label": "cu128"},
        {"series": "13.0", "label": "cu130"},
    ]
    name, _, value = output.read_text().strip().partition("=")
    assert (name, json.loads(value)) == ("toolkits", printed)
