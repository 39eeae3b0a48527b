"""The pin's data file and the patch list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flash_attn_build.errors import PinError
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import refresh
from upstream_samples import NAME, PATCH, VERSION, make_archive, make_pin, sha256

FIRST = "0001-first.patch"


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    archive = make_archive(tmp_path / "archive.tar.gz")
    monkeypatch.setenv("FLASH_ATTENTION_SOURCE", str(archive))
    return make_pin(tmp_path / "pin", archive, {FIRST: PATCH})


def _edit(pin: Pin, **fields: Any) -> None:
    data = json.loads(pin.path.read_text())
    data.update(fields)
    pin.path.write_text(json.dumps(data))


def test_repository_pin_is_valid_and_matches_its_patches() -> None:
    pin = load_pin()
    assert pin.name == NAME
    for path in pin.patch_files():
        intro = path.read_text().partition("\n--- ")[0]
        assert f"{pin.name} {pin.version}" in " ".join(intro.split())


def test_fields(pin: Pin) -> None:
    assert (pin.name, pin.version) == (NAME, VERSION)
    assert pin.patches == ((FIRST, sha256(PATCH.encode())),)
    assert pin.patch_files() == [pin.patches_dir / FIRST]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"schema": 1}, "schema: expected the form 2, got 1", id="schema"),
        pytest.param({"version": "../x"}, "version: expected", id="version"),
        pytest.param({"name": 3}, "name: expected", id="name"),
        pytest.param({"more": 1}, "expected the fields", id="unknown-field"),
        pytest.param({"sdist": []}, "lacks sdist.sha256", id="sdist-type"),
        pytest.param({"sdist": {"sha256": "A" * 64, "size": 1}}, "sdist.sha256", id="sdist-hash"),
        pytest.param({"sdist": {"sha256": "a" * 64, "size": True}}, "sdist.size", id="sdist-size"),
        pytest.param({"sdist": {"sha256": "a" * 64}}, "lacks sdist.size", id="sdist-field"),
        pytest.param({"tree_sha256": "a"}, "tree_sha256: expected", id="tree-hash"),
        pytest.param({"patches": {}}, "lacks patches", id="patches-type"),
        pytest.param(
            {"patches": [{"name": "../0001-x.patch", "sha256": "a" * 64}]},
            "patches[].name",
            id="patch-name",
        ),
        pytest.param(
            {"patches": [{"name": n, "sha256": "a" * 64} for n in ("0002-b.patch", FIRST)]},
            "ascending order",
            id="patch-order",
        ),
        pytest.param(
            {"patches": [{"name": FIRST, "sha256": "a" * 64}] * 2},
            "unique names",
            id="patch-twice",
        ),
    ],
)
def test_malformed_field_is_named(pin: Pin, fields: dict[str, Any], words: str) -> None:
    _edit(pin, **fields)
    with pytest.raises(PinError) as caught:
        load_pin(pin.path)
    assert words in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["absent", "not-json", "not-an-object"])
def test_unreadable_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "upstream.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PinError, match=r"upstream\.json"):
        load_pin(path)


def test_patch_listed_but_missing(pin: Pin) -> None:
    (pin.patches_dir / FIRST).unlink()
    with pytest.raises(PinError, match=r"listed in upstream\.json, but missing"):
        pin.patch_files()


def test_patch_present_but_not_listed(pin: Pin) -> None:
    (pin.patches_dir / "0002-second.patch").write_text(PATCH)
    with pytest.raises(PinError, match=r"0002-second\.patch: present, but not listed"):
        pin.patch_files()


def test_patch_with_another_hash(pin: Pin) -> None:
    (pin.patches_dir / FIRST).write_text(PATCH + "\n")
    with pytest.raises(PinError, match="expected sha256") as caught:
        pin.patch_files()
    assert sha256(PATCH.encode() + b"\n") in str(caught.value)
    assert "refresh" in str(caught.value)


def test_refresh_lists_what_is_there(pin: Pin) -> None:
    (pin.patches_dir / FIRST).write_text(PATCH.replace("THREE", "3"))
    second = PATCH.replace("softmax.h", "fwd.cu").replace("three", "// a kernel")
    second = second.replace("@@ -1,0 +2 @@\n+one and a half\n", "").replace("-3 +4", "-1 +1")
    (pin.patches_dir / "0002-second.patch").write_text(second)
    refresh(pin)
    again = load_pin(pin.path)
    assert [name for name, _ in again.patches] == [FIRST, "0002-second.patch"]
    assert len(again.patch_files()) == 2
    assert (again.version, again.sha256, again.size) == (pin.version, pin.sha256, pin.size)
    assert again.tree_sha256 == pin.tree_sha256
    assert again.patched_tree_sha256 != pin.patched_tree_sha256
    assert [entry.name for entry in pin.path.parent.glob(".*")] == []


def test_refresh_without_patches(pin: Pin) -> None:
    (pin.patches_dir / FIRST).unlink()
    pin.patches_dir.rmdir()
    refresh(pin)
    again = load_pin(pin.path)
    assert again.patch_files() == []
    assert again.patched_tree_sha256 == again.tree_sha256


def test_refresh_refuses_other_files(pin: Pin) -> None:
    before = pin.path.read_bytes()
    (pin.patches_dir / "notes.txt").write_text("x")
    with pytest.raises(PinError, match=r"notes\.txt"):
        refresh(pin)
    assert pin.path.read_bytes() == before
