"""CUTLASS's licence text.

The source distribution lacks CUTLASS's licence file, but every CUTLASS header opens with the
text, and binary redistribution has to carry it.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import LicenceError

# CUTLASS's root header; its copyright line spans the years of the project.
HEADER = "cutlass/include/cutlass/cutlass.h"

_BSD_3_CLAUSE = (
    "Copyright (c)",
    "SPDX-License-Identifier: BSD-3-Clause",
    "Redistributions of source code must retain the above copyright notice",
    "Redistributions in binary form must reproduce the above copyright notice",
    "Neither the name of the copyright holder nor",
    'PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"',
    "POSSIBILITY OF SUCH DAMAGE",
)


def cutlass_licence(tree: Path) -> str:
    """Take the licence text from the comment that opens a CUTLASS header.

    Args:
        tree: The prepared tree.

    Returns:
        The text, without comment marks.

    Raises:
        LicenceError: The header is missing, or does not open with a complete BSD-3-Clause text.
    """
    header = tree / HEADER
    advice = (
        "find where CUTLASS now states its licence, and adapt flash_attn_build.upstream.licence"
    )
    try:
        content = header.read_text(encoding="utf-8")
    except OSError as error:
        raise LicenceError(f"{HEADER}: cannot be read ({error.strerror}); {advice}") from error
    opening, end, _ = content.partition("*/")
    if not (content.startswith("/*") and end):
        raise LicenceError(f"{HEADER}: does not open with a comment; {advice}")
    # The first and last line are rows of stars.
    lines = [line.strip().removeprefix("*").strip() for line in opening.splitlines()[1:]]
    text = "\n".join(lines).strip(" *\n") + "\n"
    flat = " ".join(text.split())
    absent = [phrase for phrase in _BSD_3_CLAUSE if phrase not in flat]
    if absent:
        raise LicenceError(
            f"{HEADER}: its opening comment is not the BSD-3-Clause text, it lacks {absent[0]!r}; "
            f"{advice}"
        )
    return text
