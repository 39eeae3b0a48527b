"""The whole stage, through its command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from flash_attn_build.errors import RefusedError
from flash_attn_build.files import write_text
from flash_attn_build.upstream.__main__ import main
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import CUTLASS_LICENCE, STAMP, cutlass_licence
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


def run(pin: Pin, *arguments: str | Path) -> int:
    return main(["--pin", str(pin.path), *map(str, arguments)])


def list_by_hand(pin: Pin, text: str) -> None:
    """Puts a patch in the place of the first, with its hash, but without `refresh`."""
    (pin.path.parent / "patches" / FIRST).write_text(text)
    record = json.loads(pin.path.read_text())
    record["patches"][0]["sha256"] = sha256(text.encode())
    pin.path.write_text(json.dumps(record))


def test_tree_and_output(pin: Pin, dest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest.mkdir(parents=True)  # an empty folder is no obstacle, and neither is a checkout around it
    subprocess.run(["git", "init", "--quiet", str(dest.parents[1])], check=True)
    assert run(pin, "prepare", "--dest", dest) == 0
    tree = tree_of(dest)
    assert set(tree) == PREPARED | {STAMP}
    assert tree[SOFTMAX] == PATCHED
    assert tree[LICENCE] == FILES["LICENSE"].encode()
    assert b"The Sample Authors" in tree[CUTLASS_LICENCE]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "version": VERSION,
        "sha256": pin.sha256,
        "patches": [{"name": FIRST, "sha256": sha256(PATCH.encode())}],
        "dest": str(dest),
    }
    assert run(pin, "prepare", "--unpatched", "--dest", dest) == 0
    assert (dest / SOFTMAX).read_bytes() == PLAIN
    assert json.loads(capsys.readouterr().out)["patches"] == []
    assert list(dest.parent.iterdir()) == [dest]


def test_second_call_touches_nothing(
    pin: Pin, dest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def times() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in [dest, *dest.rglob("*")]}

    assert run(pin, "prepare", "--dest", dest) == 0
    first, before = capsys.readouterr().out, times()
    monkeypatch.setenv("FLASH_ATTENTION_SOURCE", "/nothing/here")  # not even looked at
    assert run(pin, "prepare", "--dest", dest) == 0
    assert capsys.readouterr().out == first
    assert times() == before


def test_tree_follows_the_patches(pin: Pin, dest: Path) -> None:
    patches = pin.path.parent / "patches"
    unfit = PATCH.replace("@@ -1,0 +2 @@\n+one and a half\n", "", 1)
    second = f"flash-attn {VERSION}\n--- a/{SOFTMAX}\n+++ b/{SOFTMAX}\n@@ -4 +4 @@\n-THREE\n+3\n"
    refused = 1
    for text, status, expected in (
        (None, 0, PATCHED), (unfit, refused, PATCHED), (second, 0, PATCHED.replace(b"THREE", b"3"))
    ):  # fmt: skip
        if text:
            (patches / SECOND).write_text(text)
            assert run(pin, "refresh") == status
        assert run(pin, "prepare", "--dest", dest) == status
        assert (dest / SOFTMAX).read_bytes() == expected
    assert load_pin(pin.path).patch_files() == [patches / FIRST, patches / SECOND]
    for name in (FIRST, SECOND):
        (patches / name).unlink()
    assert run(pin, "refresh") == 0
    again = load_pin(pin.path)
    assert (again.patches, again.patched_tree_sha256) == ({}, pin.tree_sha256)
    assert list(pin.path.parent.glob(".*")) == []
    assert run(pin, "prepare", "--dest", dest) == 0
    assert (dest / SOFTMAX).read_bytes() == PLAIN
    assert list(dest.parent.iterdir()) == [dest]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PATCH.replace("-three", "-drei"), "does not apply"),
        (PATCH.replace("softmax.h", "other.h"), "No such file"),
        (PATCH.replace("/flash_attn", "/../flash_attn"), "does not apply"),
        (PATCH[:-3], "does not apply"),
        (PATCH.replace(VERSION, "1.0"), f"flash-attn {VERSION}"),
    ],
    ids=["hunk", "file", "parent", "cut off", "other pin"],
)
def test_patch_that_does_not_apply(
    pin: Pin, dest: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pin.path.read_bytes()
    (pin.path.parent / "patches" / FIRST).write_text(text)
    assert run(pin, "refresh") == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {FIRST}: ")
    assert words in message
    assert pin.path.read_bytes() == before
    # Neither does the build take it, where someone lists it by hand.
    list_by_hand(pin, text)
    assert run(pin, "prepare", "--dest", dest) == 1
    assert tree_of(dest.parent) == {}


def test_patch_that_fits_elsewhere_is_noticed(
    pin: Pin, dest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # git puts a hunk where its lines are, whatever its header says: the tree's hash tells.
    list_by_hand(pin, PATCH.replace("@@ -1,0 +2 @@", "@@ -2,0 +3 @@"))
    assert run(pin, "prepare", "--dest", dest) == 1
    assert f"sha256 {pin.patched_tree_sha256}, but" in capsys.readouterr().err
    assert tree_of(dest.parent) == {}


@pytest.mark.parametrize("kind", ["edited", "folder", "file"])
def test_what_is_not_as_it_was_made_is_not_replaced(
    pin: Pin, dest: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = dest if kind == "file" else dest / "work.txt"
    if kind == "edited":
        assert run(pin, "prepare", "--dest", dest) == 0
        foreign = dest / "flash_attn/src/fwd.cu"
        (dest / "flash_attn/src/new.h").write_text("")
        (dest / "cutlass/include/cute/tensor.hpp").unlink()
    write_text(foreign, "mine")
    before = tree_of(dest.parent)
    for extra in ((), ("--unpatched",)):
        assert run(pin, "prepare", "--dest", dest, *extra) == 1
        assert "not made by this tool, or edited since; save your" in capsys.readouterr().err
    assert run(pin, "prepare", "--dest", foreign / "x" / "upstream") == 1
    assert "choose another destination" in capsys.readouterr().err
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
