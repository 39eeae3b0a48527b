from __future__ import annotations

import json
from pathlib import Path

import pytest
from flash_attn_build import shelf
from flash_attn_build.errors import SettingError
from flash_attn_build.gate.policy import load_policy

POLICY = load_policy()


def put(folder: Path, cuda: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "a-1-py3-none-any.whl"
    wheel.write_text("")
    if cuda is not None:
        beside = folder / f"{wheel.name}.manifest.json"
        beside.write_text(json.dumps({"cuda_toolkit": cuda}))
    return wheel


def test_finds_wheels_of_a_release_and_no_others(tmp_path: Path) -> None:
    meant = [put(tmp_path, "13.0.88"), put(tmp_path / "cu128", "12.8.93")]
    put(tmp_path / "dev", "13.0.88")
    put(tmp_path / "cu130" / "deeper", "13.0.88")
    assert shelf.find_wheels(tmp_path) == sorted(meant)


def test_finds_reports_however_deep(tmp_path: Path) -> None:
    for name in ("verification", "cu130/verification"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "verification.json").write_text("{}")
        (tmp_path / name / "verification.html").write_text("")
    assert len(shelf.find_reports(tmp_path)) == 2


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("13.0.88", "cu130"), ("12.8.93", "cu128"), ("11.8.0", None), (None, None)],
)
def test_the_manifest_tells_the_toolkit(
    tmp_path: Path, cuda: str | None, expected: str | None
) -> None:
    kit = shelf.toolkit_of(put(tmp_path, cuda), POLICY)
    assert (kit and kit.label) == expected


def test_chooses_by_toolkit(tmp_path: Path) -> None:
    one, other = put(tmp_path / "cu130", "13.0.88"), put(tmp_path / "cu128", "12.8.93")
    assert shelf.choose(tmp_path, "13.0", POLICY) == one
    assert shelf.choose(tmp_path, "12.8", POLICY) == other


def test_says_what_is_there_instead(tmp_path: Path) -> None:
    put(tmp_path / "cu128", "12.8.93")
    put(tmp_path / "cu130", None)
    with pytest.raises(SettingError) as caught:
        shelf.choose(tmp_path, "13.0", POLICY)
    assert "expected one wheel of CUDA 13.0, found 0" in str(caught.value)
    assert "cu128/a-1-py3-none-any.whl: CUDA 12.8" in str(caught.value)
    assert "cu130/a-1-py3-none-any.whl: no manifest of a known toolkit" in str(caught.value)


def test_copies_what_belongs_together(tmp_path: Path) -> None:
    wheel = put(tmp_path / "dist", "13.0.88")
    copies = tmp_path / "copies"
    copies.mkdir()
    assert shelf.copy_with_manifest(wheel, copies) == copies / wheel.name
    assert sorted(p.name for p in copies.iterdir()) == [
        wheel.name,
        f"{wheel.name}.manifest.json",
    ]
