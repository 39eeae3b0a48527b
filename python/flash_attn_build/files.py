"""Files that appear whole or not at all, and hashes of files and folders."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the source tree


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Makes a folder beside a path; it takes the path's place if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as work:
        (made := Path(work, "new")).mkdir()
        yield made
        if path.exists():
            path.rename(Path(work, "old"))
        made.rename(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as work:
        (made := Path(work, "new")).write_bytes(data)
        made.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, indented, in the order of the value's keys."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file: see `parse_json` and `read_regular`."""
    return parse_json(read_regular(path))


def parse_json(data: bytes) -> Any:
    """Parses JSON as every reader does.

    Raises ValueError: not UTF-8, a key twice, an infinite number, half of a surrogate pair.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    found = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return found


def read_regular(path: Path) -> bytes:
    """Reads a file that is no link, which may lead elsewhere, and no pipe, which may never end."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError("it is a link, or no regular file")
    return path.read_bytes()


def sha256_of(path: Path) -> str:
    """Hashes a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree_sha256(named: Mapping[str, bytes]) -> str:
    """Hashes files by name and content, wherever they lie.

    Over each file, in the order of names: name, NUL, size, NUL, bytes. The size keeps bytes from
    moving between a file and its neighbour unnoticed.
    """
    digest = hashlib.sha256()
    for name, data in sorted(named.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def read_tree(root: Path, starts: Iterable[str] = (".",)) -> dict[str, bytes]:
    """Reads files below a folder, or those of `starts` in it, of which each must hold one.

    Python's caches are left out.

    Returns:
        Content by POSIX path relative to the root.
    """
    found: dict[str, bytes] = {}
    for start in starts:
        at = root / start
        paths = [path for path in (at, *at.rglob("*")) if path.is_file()]
        paths = [path for path in paths if "__pycache__" not in path.parts]
        if not paths:
            raise FileNotFoundError(2, "no such file", str(at))
        found |= {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    return found
