"""Checks that every file under docs/results says where it comes from, and is of today's kernels.

    python -m tests.results        # lists what is stale, exit status 1 if anything is

A JSON file names, at its top or under `provenance`: `date`, `command`, `hardware`, `versions`,
`wheel` (name and sha256) and `sources` (digests of what the kernels were compiled from). One whose
numbers do not depend on the kernels says so by `"depends_on_kernels": false`, with a `reason`, and
needs no wheel and sources. One that follows from the bits of results, however they are computed, is
of today as long as bits_version is: golden hashes hold it. A manifest lies beside the report of its
wheel. Any other file is made from the JSON file beside it of the same name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests import conftest as _finds_flash_attn_build  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
_ALWAYS = {"date": str, "command": str, "hardware": dict, "versions": dict}
# What attentions keep, and what trainings become with them. The times beside the first are of the
# kernels that it names.
OF_BITS = ("scoreboard", "deviation")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MOST_LINES, MOST_BYTES = 6_000, 1_500_000
_NAMED = re.compile(r"docs/results/[\w./-]*\.\w+|(?<=\()results/[\w./-]*\.\w+")


def problems(results: Path, sources: Mapping[str, str]) -> Iterator[str]:
    """Yields what is wrong, by file.

    Args:
        results: the folder.
        sources: digests of the tree's kernels.
    """
    files = sorted(path for path in results.rglob("*") if path.is_file())
    for path in files:
        name = path.relative_to(results).as_posix()
        if path.name.endswith(".manifest.json"):
            beside = path.with_name(path.name.replace(".manifest.json", ".json"))
            if not beside.exists():
                yield f"{name}: there is no {beside.name} that it is the manifest of"
        elif path.suffix == ".json":
            yield from (f"{name}: {words}" for words in _of_json(path, sources))
        elif not path.with_suffix(".json").exists():
            yield f"{name}: there is no {path.stem}.json beside it that it is made from"
    texts = [path.read_bytes() for path in files]
    for what, found, most in (
        ("lines", sum(text.count(b"\n") for text in texts), MOST_LINES),
        ("bytes", sum(map(len, texts)), MOST_BYTES),
    ):
        if found > most:
            yield f"all files together: {found} {what}, expected at most {most}"


def _of_json(path: Path, sources: Mapping[str, str]) -> Iterator[str]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found: Mapping[str, Any] = record.get("provenance", record)
        fields = {name: found.get(name) for name in (*_ALWAYS, "wheel", "sources")}
    except (ValueError, AttributeError) as error:
        yield f"no JSON object ({error})"
        return
    for name, kind in _ALWAYS.items():
        if not isinstance(fields[name], kind) or not fields[name]:
            yield f"{name}: missing"
    if found.get("depends_on_kernels") is False:
        if not found.get("reason"):
            yield "reason: missing; why does it not depend on the kernels?"
        return
    wheel, own = fields["wheel"], fields["sources"]
    if not (isinstance(wheel, dict) and _SHA256.fullmatch(str(wheel.get("sha256")))):
        yield "wheel: missing, or without its sha256"
    if not isinstance(own, dict):
        yield "sources: missing"
        return
    if path.stem in OF_BITS:
        if found.get("bits_version") != bits_version():
            yield f"stale: of bits_version {found.get('bits_version')}, not {bits_version()}"
        return
    differing = [part for part, digest in sources.items() if own.get(part) != digest]
    if differing:
        yield f"stale: of other kernels ({', '.join(differing)} differ)"


def unnamed(root: Path) -> Iterator[str]:
    """Yields results that documents name and that are not there."""
    for document in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if (root / "docs" / "results") in document.parents:
            continue
        for name in sorted(set(_NAMED.findall(document.read_text(encoding="utf-8")))):
            path = name if name.startswith("docs/") else f"docs/{name}"
            if not (root / path).exists():
                yield f"{document.relative_to(root)}: names {name}, which is not there"


def bits_version() -> int:
    """Returns the number of this tree's bits."""
    table = json.loads((ROOT / "cpp" / "instances.json").read_text(encoding="utf-8"))
    version: int = table["bits_version"]
    return version


def kernels() -> dict[str, str]:
    """Returns digests of what decides the machine code of kernels: not of the Python around it."""
    from flash_attn_build.compile.sources import NATIVE, digests

    return {part: digest for part, digest in digests().items() if part in NATIVE}


def main() -> int:
    """Prints a line for each problem."""
    found = [*problems(ROOT / "docs" / "results", kernels()), *unnamed(ROOT)]
    for words in found:
        print(words)
    if found:
        print(f"docs/results: {len(found)} problems; take stale results again, or remove them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
