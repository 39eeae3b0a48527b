"""CUTLASS's licence, from a header's opening comment."""

from __future__ import annotations

from pathlib import Path

import pytest
from flash_attn_build.errors import LicenceError
from flash_attn_build.upstream.licence import HEADER, cutlass_licence
from upstream_samples import HEADER as SAMPLE


def _tree(folder: Path, text: str) -> Path:
    (folder / HEADER).parent.mkdir(parents=True)
    (folder / HEADER).write_text(text)
    return folder


def test_text_without_comment_marks(tmp_path: Path) -> None:
    text = cutlass_licence(_tree(tmp_path, SAMPLE))
    assert text.startswith("Copyright (c) 2001 The Sample Authors. All rights reserved.\nSPDX")
    assert text.endswith("POSSIBILITY OF SUCH DAMAGE.\n")
    assert "*" not in text
    assert "pragma" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("#pragma once\n", "does not open with a comment"),
        (SAMPLE.partition("****/")[0], "does not open with a comment"),
        (SAMPLE.replace("BSD-3-Clause", "Other"), "SPDX"),
        (SAMPLE.replace("Neither", "Any"), "lacks 'Neither"),
    ],
    ids=["none", "no comment", "open", "other licence", "two clauses"],
)
def test_other_header(tmp_path: Path, text: str | None, words: str) -> None:
    with pytest.raises(LicenceError, match=words):
        cutlass_licence(tmp_path if text is None else _tree(tmp_path, text))
