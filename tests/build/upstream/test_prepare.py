"""The whole stage: a tree that follows pin and patches, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.files import write_text
from flash_attn_build.upstream.__main__ import main
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import (
    CUTLASS_LICENCE,
    STAMP,
    cutlass_licence,
    prepare,
    refresh,
)
from flash_attn_build.upstream.source import LICENCE
from stand_ins import sha256, tree_of
from upstream_samples import FILES, FIRST, HEADER, PATCH, PREPARED, VERSION

SECOND = "0002-second.patch"
PATCHED = b"one\none and a half\ntwo\nTHREE\nfour\n"
PLAIN = b"one\ntwo\nthree\nfour\n"
SOFTMAX = "flash_attn/src/softmax.h"


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "build" / "upstream"


def make(pin: Pin, dest: Path, patched: bool = True) -> None:
    """With the data file as it is by now."""
    prepare(dest, load_pin(pin.path), patched=patched)


def list_by_hand(pin: Pin, text: str) -> None:
    """Puts a patch in the place of the first, with its hash, but without `refresh`."""
    (pin.path.parent / "patches" / FIRST).write_text(text)
    record = json.loads(pin.path.read_text())
    record["patches"][0]["sha256"] = sha256(text.encode())
    pin.path.write_text(json.dumps(record))


def test_the_command_makes_a_tree_and_says_of_what(
    pin: Pin, dest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> dict[str, object]:
        assert main(["--pin", str(pin.path), "prepare", "--dest", str(dest), *options]) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    def times() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in [dest, *dest.rglob("*")]}

    dest.mkdir(parents=True)  # an empty folder is no obstacle, and neither is a checkout around it
    subprocess.run(["git", "init", "--quiet", str(dest.parents[1])], check=True)
    patches = [{"name": FIRST, "sha256": sha256(PATCH.encode())}]
    expected = {"version": VERSION, "sha256": pin.sha256, "patches": patches, "dest": str(dest)}
    assert run() == expected
    tree, before = tree_of(dest), times()
    assert set(tree) == PREPARED | {STAMP}
    assert tree[SOFTMAX] == PATCHED
    assert tree[LICENCE] == FILES["LICENSE"].encode()
    assert b"The Sample Authors" in tree[CUTLASS_LICENCE]
    with monkeypatch.context() as patch:
        patch.setenv("FLASH_ATTENTION_SOURCE", "/nothing/here")  # not even looked at
        assert run() == expected
    assert times() == before
    assert run("--unpatched") == {**expected, "patches": []}
    assert (dest / SOFTMAX).read_bytes() == PLAIN
    assert list(dest.parent.iterdir()) == [dest]


def test_tree_follows_the_patches(pin: Pin, dest: Path) -> None:
    make(pin, dest)
    second = pin.path.parent / "patches" / SECOND
    second.write_text(PATCH.replace("@@ -1,0 +2 @@\n+one and a half\n", "", 1))  # does not fit
    with pytest.raises(RefusedError, match="does not apply"):
        refresh(pin)
    with pytest.raises(RefusedError, match="not those that"):
        make(pin, dest)
    assert (dest / SOFTMAX).read_bytes() == PATCHED
    head = f"flash-attn {VERSION}\n--- a/{SOFTMAX}\n+++ b/{SOFTMAX}\n"
    second.write_text(f"{head}@@ -4 +4 @@\n-THREE\n+3\n")
    refresh(pin)
    make(pin, dest)
    assert (dest / SOFTMAX).read_bytes() == PATCHED.replace(b"THREE", b"3")
    assert load_pin(pin.path).patch_files() == [second.with_name(FIRST), second]
    for path in (second.with_name(FIRST), second):
        path.unlink()
    assert main(["--pin", str(pin.path), "refresh"]) == 0
    again = load_pin(pin.path)
    assert (again.patches, again.patched_tree_sha256) == ({}, pin.tree_sha256)
    assert list(pin.path.parent.glob(".*")) == []
    make(pin, dest)
    assert (dest / SOFTMAX).read_bytes() == PLAIN
    assert list(dest.parent.iterdir()) == [dest]


@pytest.mark.parametrize(("text", "words"), [
    (PATCH.replace("-three", "-drei"), "does not apply"),
    (PATCH.replace("softmax.h", "other.h"), "No such file"),
    (PATCH.replace("/flash_attn", "/../flash_attn"), "does not apply"),
    (PATCH[:-3], "does not apply"),
    (PATCH.replace(VERSION, "1.0"), f"flash-attn {VERSION}"),
], ids=["hunk", "file", "parent", "cut off", "other pin"])  # fmt: skip
def test_patch_that_does_not_apply(pin: Pin, dest: Path, text: str, words: str) -> None:
    before = pin.path.read_bytes()
    (pin.path.parent / "patches" / FIRST).write_text(text)
    with pytest.raises(RefusedError, match=f"^{FIRST}: .*{words}"):
        refresh(pin)
    assert pin.path.read_bytes() == before
    # Neither does the build take it, where someone lists it by hand.
    list_by_hand(pin, text)
    with pytest.raises(RefusedError, match=words):
        make(pin, dest)
    assert tree_of(dest.parent) == {}


def test_patch_that_fits_elsewhere_is_noticed(pin: Pin, dest: Path) -> None:
    # git puts a hunk where its lines are, whatever its header says: the tree's hash tells.
    list_by_hand(pin, PATCH.replace("@@ -1,0 +2 @@", "@@ -2,0 +3 @@"))
    with pytest.raises(RefusedError, match=f"sha256 {pin.patched_tree_sha256}, but"):
        make(pin, dest)
    assert tree_of(dest.parent) == {}


@pytest.mark.parametrize("kind", ["edited", "folder", "file"])
def test_what_is_not_as_it_was_made_is_not_replaced(pin: Pin, dest: Path, kind: str) -> None:
    foreign = dest if kind == "file" else dest / "work.txt"
    if kind == "edited":
        make(pin, dest)
        foreign = dest / "flash_attn/src/fwd.cu"
        (dest / "flash_attn/src/new.h").write_text("")
        (dest / "cutlass/include/cute/tensor.hpp").unlink()
    write_text(foreign, "mine")
    before = tree_of(dest.parent)
    for patched in (True, False):
        with pytest.raises(BuildError, match="not made by this tool, or edited since; save your"):
            make(pin, dest, patched)
    with pytest.raises(BuildError, match=r"cannot be written .* choose another destination"):
        make(pin, foreign / "x" / "upstream")
    assert tree_of(dest.parent) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("/****", "// ***"), ("BSD-3-Clause", "Other"), ("Neither", "Any")],
    ids=["no comment", "other licence", "two clauses"],
)
def test_the_licence_of_cutlass(old: str, new: str) -> None:
    text = cutlass_licence(HEADER)
    assert text.startswith("Copyright (c) 2001 The Sample Authors. All rights reserved.\nSPDX")
    assert text.endswith("POSSIBILITY OF SUCH DAMAGE.\n")
    assert not {"*", "pragma"} & set(text.split())
    with pytest.raises(RefusedError, match="does not open with the BSD-3-Clause text"):
        cutlass_licence(HEADER.replace(old, new))
