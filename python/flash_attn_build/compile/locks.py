"""The hash-locked lists in locks/, of what builds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]


def requirements(cuda: str, root: Path = ROOT) -> Iterator[Requirement]:
    """Reads what a build with `--locked` installs.

    Args:
        cuda: Version of nvcc: the compilers of CUDA 12 and 13 have lists of their own.
        root: The source tree.

    Yields:
        A requirement with one version each.

    Raises:
        LookupError: A list is not there, or empty.
    """
    for name in ("build", "torch", "cuda12" if cuda.startswith("12.") else "cuda"):
        try:
            text = (root / "locks" / f"{name}.txt").read_text(encoding="utf-8")
        except OSError as error:
            raise LookupError(f"locks/{name}.txt: {error.strerror}") from error
        found = re.findall(r"^[a-z0-9][^\\\n]*==[^\\\n]+", text, re.MULTILINE)
        if not found:
            raise LookupError(f"locks/{name}.txt: names no version")
        yield from map(Requirement, found)
