"""Strict application of unified diffs."""

from __future__ import annotations

import difflib
import re

import pytest
from flash_attn_build.upstream.errors import PatchError
from flash_attn_build.upstream.patch import apply, parse
from hypothesis import given
from hypothesis import strategies as st

HEAD = "Why: a sample.\n\n--- a/f.h\n+++ b/f.h\n"
CONTENT = b"one\ntwo\nthree\nfour\n"


def _apply(hunks: str, content: bytes = CONTENT) -> bytes:
    return apply(parse("p.patch", (HEAD + hunks).encode()), "f.h", content)


@pytest.mark.parametrize(
    ("hunks", "expected"),
    [
        pytest.param("@@ -2 +2 @@\n-two\n+TWO\n", "one\nTWO\nthree\nfour\n", id="replace"),
        pytest.param("@@ -2,0 +3 @@\n+x\n", "one\ntwo\nx\nthree\nfour\n", id="insert"),
        pytest.param("@@ -0,0 +1 @@\n+x\n", "x\none\ntwo\nthree\nfour\n", id="insert-first"),
        pytest.param("@@ -4,0 +5 @@\n+x\n", "one\ntwo\nthree\nfour\nx\n", id="insert-last"),
        pytest.param("@@ -3,2 +2,0 @@\n-three\n-four\n", "one\ntwo\n", id="delete"),
        pytest.param(
            "@@ -1,3 +1,4 @@ context\n one\n-two\n+2\n+2.5\n three\n",
            "one\n2\n2.5\nthree\nfour\n",
            id="with-context",
        ),
        pytest.param(
            "@@ -1,0 +2,2 @@\n+a\n+b\n@@ -3 +5 @@\n-three\n+3\n",
            "one\na\nb\ntwo\n3\nfour\n",
            id="two-hunks",
        ),
        pytest.param("@@ -1 +1 @@\n-one\n+--- x\n", "--- x\ntwo\nthree\nfour\n", id="dashes"),
        pytest.param(
            "@@ -4 +4 @@\n-four\n+4\n\\ No newline at end of file\n",
            "one\ntwo\nthree\n4",
            id="no-newline",
        ),
    ],
)
def test_applies(hunks: str, expected: str) -> None:
    assert _apply(hunks) == expected.encode()


@pytest.mark.parametrize(
    ("hunks", "words"),
    [
        pytest.param(
            "@@ -3 +3 @@\n-two\n+2\n", "line 3: expected 'two\\n', found 'three\\n'", id="moved"
        ),
        pytest.param(
            "@@ -1,2 +1,2 @@\n ONE\n-two\n+2\n", "expected 'ONE\\n', found 'one\\n'", id="context"
        ),
        pytest.param(
            "@@ -2 +2 @@\n-two \n+2\n", "expected 'two \\n', found 'two\\n'", id="trailing-space"
        ),
        pytest.param("@@ -2 +2 @@\n-two\r\n+2\n", "expected 'two\\r\\n'", id="line-end"),
        pytest.param(
            "@@ -5 +5 @@\n-five\n+5\n", "expected 'five\\n', found the end of the file", id="end"
        ),
        pytest.param("@@ -5,0 +6 @@\n+x\n", "the file has 4 lines", id="insert-past-the-end"),
        pytest.param("@@ -2 +3 @@\n-two\n+2\n", "its header says 3", id="new-line-number"),
        pytest.param(
            "@@ -3 +3 @@\n-three\n+3\n@@ -1 +1 @@\n-one\n+1\n", "overlaps", id="wrong-order"
        ),
        pytest.param(
            "@@ -1 +1 @@\n-one\n+1\n@@ -1 +1 @@\n-one\n+1\n", "overlaps", id="already-applied"
        ),
    ],
)
def test_hunk_that_does_not_fit_is_named(hunks: str, words: str) -> None:
    with pytest.raises(PatchError) as caught:
        _apply(hunks)
    message = str(caught.value)
    assert message.startswith("p.patch: line ")
    assert "hunk for f.h" in message
    assert words in message


def test_message_names_the_hunk_line() -> None:
    with pytest.raises(PatchError, match=re.escape("p.patch: line 8: hunk for f.h")):
        _apply("@@ -1 +1 @@\n-one\n+1\n@@ -3 +3 @@\n-nothing\n+3\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "no '--- ' line", id="empty"),
        pytest.param("only words\n", "no '--- ' line", id="only-words"),
        pytest.param(HEAD, "no hunk", id="no-hunk"),
        pytest.param("--- a/f.h\n", "middle", id="no-second-header"),
        pytest.param("--- a/f.h\n@@ -1 +1 @@\n", "expected '+++ '", id="one-header"),
        pytest.param("--- a/f.h\n+++ b/g.h\n@@ -1 +1 @@\n-a\n+b\n", "renames", id="rename"),
        pytest.param("--- /dev/null\n+++ b/f.h\n@@ -0,0 +1 @@\n+b\n", "below a/", id="new-file"),
        pytest.param("--- a/f.h\n+++ /dev/null\n@@ -1 +0,0 @@\n-b\n", "below b/", id="deletion"),
        pytest.param(HEAD + "@@ what @@\n", "expected '@@ -line", id="hunk-header"),
        pytest.param(HEAD + "@@ -1 +1 @@\n-a\n", "middle of a hunk", id="truncated"),
        pytest.param(HEAD + "@@ -1 +1 @@\n-a\n+b\n+c\n", "counts too few", id="too-many-lines"),
        pytest.param(HEAD + "@@ -1 +1,2 @@\n-a\n-b\n+c\n+d\n", "counts 1 old", id="miscounted"),
        pytest.param(HEAD + "@@ -1,2 +1,2 @@\n-a\n\n+b\n", "expected ' '", id="bare-line"),
        pytest.param(HEAD + "@@ -1 +1 @@\n a\n", "changes nothing", id="only-context"),
        pytest.param(HEAD + "@@ -0 +1 @@\n-a\n+b\n", "count from 1", id="line-zero"),
        pytest.param((HEAD + "@@ -1 +1 @@\n-a\n+b\n") * 2, "counts too few", id="words-between"),
        pytest.param(
            HEAD + "@@ -1 +1 @@\n-a\n+b\n" + HEAD.split("\n\n")[1] + "@@ -1 +1 @@\n-b\n+c\n",
            "comes twice",
            id="file-twice",
        ),
    ],
)
def test_malformed_patch(text: str, words: str) -> None:
    with pytest.raises(PatchError) as caught:
        parse("p.patch", text.encode())
    assert words in str(caught.value)


def test_intro_and_several_files() -> None:
    second = "diff --git a/g.h b/g.h\nindex 1..2 100644\n--- a/g.h\t2020\n+++ b/g.h\t2020\n"
    text = f"{HEAD}@@ -1 +1 @@\n-a\n+b\n{second}@@ -1 +1 @@\n-c\n+d\n"
    patch = parse("p.patch", text.encode())
    assert patch.intro == "Why: a sample.\n\n"
    assert apply(patch, "f.h", b"a\n") == b"b\n"
    assert apply(patch, "g.h", b"c\n") == b"d\n"


_lines = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "--- x\n", "@@ -1 +1 @@\n"]))


@given(old=_lines, new=_lines, context=st.integers(0, 3))
def test_applies_what_difflib_says(old: list[str], new: list[str], context: int) -> None:
    diff = "".join(difflib.unified_diff(old, new, "a/f.h", "b/f.h", n=context))
    if diff:
        patch = parse("p.patch", diff.encode())
        assert apply(patch, "f.h", "".join(old).encode()) == "".join(new).encode()
    else:
        assert old == new


@given(old=_lines, new=_lines, other=_lines)
def test_never_applies_without_an_exact_match(
    old: list[str], new: list[str], other: list[str]
) -> None:
    diff = "".join(difflib.unified_diff(old, new, "a/f.h", "b/f.h", n=len(old)))
    if diff and other[: len(old)] != old:
        with pytest.raises(PatchError):
            apply(parse("p.patch", diff.encode()), "f.h", "".join(other).encode())
