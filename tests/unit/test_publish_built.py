from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from flash_attn_build import built
from flash_attn_build.errors import SettingError

NAME = "a-1-py3-none-any.whl"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    for label in ("cu128", "cu130"):
        folder = tmp_path / "dist" / label
        folder.mkdir(parents=True)
        (folder / NAME).write_text(label)
        (folder / f"{NAME}.manifest.json").write_text("{}")
    (tmp_path / "dist" / "dev").mkdir()
    (tmp_path / "dist" / "dev" / NAME).write_text("small")
    return tmp_path / "dist"


def test_lists_wheels_and_manifests_of_a_release(dist: Path) -> None:
    found = built.listing(dist)
    assert list(found) == [
        f"{label}/{name}"
        for label in ("cu128", "cu130")
        for name in (NAME, f"{NAME}.manifest.json")
    ]
    assert found[f"cu130/{NAME}"] == hashlib.sha256(b"cu130").hexdigest()
    assert list(built.faults(dist, built.read(json.dumps(found)))) == []


def test_tells_every_difference(dist: Path) -> None:
    told = built.listing(dist)
    (dist / "cu130" / NAME).write_text("another")
    (dist / "cu128" / NAME).rename(dist / "cu128" / "b-1-py3-none-any.whl")
    assert [fault.partition(":")[0] for fault in built.faults(dist, told)] == [
        f"cu128/{NAME}",
        f"cu128/{NAME}.manifest.json",  # of no wheel
        "cu128/b-1-py3-none-any.whl",
        f"cu130/{NAME}",
    ]


def test_one_job_tells_the_next(
    dist: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "output"
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    assert built.main(["--dist", str(dist)]) == 0
    name, _, value = output.read_text().rstrip("\n").partition("=")
    assert (name, value) == ("sha256", capsys.readouterr().out.strip())
    assert built.read(value) == built.listing(dist)


def test_nothing_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    assert built.main(["--dist", str(tmp_path)]) == SettingError.exit_code
    assert "holds no wheel" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()
