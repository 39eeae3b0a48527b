"""The pin's data file and the patch list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flash_attn_build.errors import PinError
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import refresh
from upstream_samples import FIRST, NAME, PATCH, VERSION, sha256

SECOND = "0002-second.patch"
HASH = "a" * 64


def test_repository_pin_is_valid_and_matches_its_patches() -> None:
    pin = load_pin()
    assert pin.name == NAME
    for path in pin.patch_files():
        intro = path.read_text().partition("\n--- ")[0]
        assert f"{pin.name} {pin.version}" in " ".join(intro.split())


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"schema": 1}, "schema: expected the form 2, got 1"),
    "version": ({"version": "../x"}, "version: expected"),
    "unknown field": ({"more": 1}, "expected the fields"),
    "sdist": ({"sdist": []}, "lacks sdist.sha256"),
    "sdist size": ({"sdist": {"sha256": HASH, "size": True}}, "sdist.size"),
    "sdist field": ({"sdist": {"sha256": HASH}}, "lacks sdist.size"),
    "tree hash": ({"tree_sha256": "a"}, "tree_sha256: expected"),
    "patches": ({"patches": {}}, "lacks patches"),
    "patch name": ({"patches": [{"name": "../0001-x.patch", "sha256": HASH}]}, "patches[].name"),
    "patch order": (
        {"patches": [{"name": name, "sha256": HASH} for name in (SECOND, FIRST)]},
        "ascending order",
    ),
    "patch twice": ({"patches": [{"name": FIRST, "sha256": HASH}] * 2}, "unique names"),
}


@pytest.mark.parametrize(("fields", "words"), FIELDS.values(), ids=FIELDS)
def test_malformed_field_is_named(pin: Pin, fields: dict[str, Any], words: str) -> None:
    pin.path.write_text(json.dumps({**json.loads(pin.path.read_text()), **fields}))
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


PATCHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / FIRST).unlink(), r"listed in upstream\.json, but missing"),
    "not listed": (lambda f: (f / SECOND).write_text(PATCH), rf"{SECOND}: present, but not listed"),
    "changed": (
        lambda f: (f / FIRST).write_text(PATCH + "\n"),
        f"expected sha256 .* found {sha256((PATCH + chr(10)).encode())}; .* refresh",
    ),
}


@pytest.mark.parametrize(("change", "words"), PATCHES.values(), ids=PATCHES)
def test_patches_that_are_not_those_of_the_list(
    patched: Pin, change: Callable[[Path], object], words: str
) -> None:
    change(patched.patches_dir)
    with pytest.raises(PinError, match=words):
        patched.patch_files()


def test_refresh_lists_what_is_there(patched: Pin) -> None:
    assert (patched.name, patched.version) == (NAME, VERSION)
    assert patched.patches == ((FIRST, sha256(PATCH.encode())),)
    (patched.patches_dir / FIRST).write_text(PATCH.replace("THREE", "3"))
    second = PATCH.replace("softmax.h", "fwd.cu").replace("three", "// a kernel")
    second = second.replace("@@ -1,0 +2 @@\n+one and a half\n", "").replace("-3 +4", "-1 +1")
    (patched.patches_dir / SECOND).write_text(second)
    refresh(patched)
    again = load_pin(patched.path)
    assert again.patch_files() == [patched.patches_dir / name for name in (FIRST, SECOND)]
    for field in ("version", "sha256", "size", "tree_sha256"):
        assert getattr(again, field) == getattr(patched, field)
    assert again.patched_tree_sha256 != patched.patched_tree_sha256
    assert list(patched.path.parent.glob(".*")) == []


def test_refresh_without_patches(patched: Pin) -> None:
    (patched.patches_dir / FIRST).unlink()
    patched.patches_dir.rmdir()
    refresh(patched)
    again = load_pin(patched.path)
    assert again.patch_files() == []
    assert again.patched_tree_sha256 == again.tree_sha256


def test_refresh_refuses_other_files(patched: Pin) -> None:
    before = patched.path.read_bytes()
    (patched.patches_dir / "notes.txt").write_text("x")
    with pytest.raises(PinError, match=r"notes\.txt"):
        refresh(patched)
    assert patched.path.read_bytes() == before
