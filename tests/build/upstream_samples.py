"""A tiny upstream: files, archive, pin and index, so that tests need no network."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flash_attn_build.files import sha256_of, write_json, write_text
from flash_attn_build.upstream.pin import Pin, load_pin
from flash_attn_build.upstream.prepare import refresh

NAME = "flash-attn"
VERSION = "9.8.7.post6"
ROOT = f"flash_attn-{VERSION}"
SDIST = f"{ROOT}.tar.gz"
FIRST = "0001-first.patch"

HEADER = """/****
 * Copyright (c) 2001 The Sample Authors. All rights reserved.
 * SPDX-License-Identifier: BSD-3-Clause
 *
 * 1. Redistributions of source code must retain the above copyright notice, and so on.
 * 2. Redistributions in binary form must reproduce the above copyright notice, and so on.
 * 3. Neither the name of the copyright holder nor any other name.
 *
 * PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"; NO LIABILITY FOR THE
 * POSSIBILITY OF SUCH DAMAGE.
 *
 ****/
#pragma once
"""

FILES: Mapping[str, str] = {
    "PKG-INFO": f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\n",
    "LICENSE": "sample licence\n",
    "setup.py": "raise SystemExit('must not run')\n",
    "flash_attn/__init__.py": f'__version__ = "{VERSION}"\n',
    "csrc/flash_attn/flash_api.cpp": "// not used\n",
    "csrc/flash_attn/src/softmax.h": "one\ntwo\nthree\nfour\n",
    "csrc/flash_attn/src/fwd.cu": "// a kernel\n",
    "csrc/flash_attn/src/generate.py": "# not used\n",
    "csrc/cutlass/include/cutlass/cutlass.h": HEADER,
    "csrc/cutlass/include/cute/tensor.hpp": "#pragma once\n",
}

PREPARED = {
    "flash_attn/src/softmax.h", "flash_attn/src/fwd.cu", "cutlass/include/cutlass/cutlass.h",
    "cutlass/include/cute/tensor.hpp", "licenses/FlashAttention-LICENSE",
    "licenses/CUTLASS-LICENSE.txt",
}  # fmt: skip

PATCH = f"""Targets {NAME} {VERSION}.

Why: to show how it is done.

--- a/flash_attn/src/softmax.h
+++ b/flash_attn/src/softmax.h
@@ -1,0 +2 @@
+one and a half
@@ -3 +4 @@
-three
+THREE
"""


def make_archive(path: Path, files: Mapping[str, str] = FILES, **extra: Any) -> Path:
    """Writes a source distribution; `extra`: fields of one more member, that of fwd.cu again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{ROOT}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        if extra:
            member = tarfile.TarInfo(f"{ROOT}/csrc/flash_attn/src/fwd.cu")
            for field, value in extra.items():
                setattr(member, field, value)
            tar.addfile(member)
    return path


def make_pin(folder: Path, archive: Path) -> Pin:
    """Writes upstream.json and a patch for an archive; returns the pin, as loaded."""
    data = {
        "schema": 2,
        "name": NAME,
        "version": VERSION,
        "sdist": {"sha256": sha256_of(archive)},
        "tree_sha256": "0" * 64,
        "patched_tree_sha256": "0" * 64,
        "patches": [],
    }
    write_text(folder / "patches" / FIRST, PATCH)
    write_json(folder / "upstream.json", data)
    refresh(load_pin(folder / "upstream.json"), {"FLASH_ATTENTION_SOURCE": str(archive)})
    return load_pin(folder / "upstream.json")


def make_index(folder: Path, archive: Path) -> Path:
    """Writes a simple index of one file."""
    page = folder / "flash-attn"
    write_text(page / "index.html", f'<a href="{SDIST}">{SDIST}</a>')
    (page / SDIST).write_bytes(archive.read_bytes())
    return folder
