"""Strict application of unified diffs.

Hunks carry little or no context, so that patches stay small and quote little of upstream. The
tools at hand are too lenient for such hunks: patch(1) and `git apply` move a hunk that does not
fit at its line to another place, and patch-ng takes a file that "looks patched" for success and
puts insertions without context before, not after, their line. Here a hunk fits at exactly its
stated lines, byte for byte, or the patch fails. Files are only modified, never made or deleted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flash_attn_build.upstream.errors import PatchError

_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
# What git writes between two files' hunks.
_BETWEEN = (b"diff ", b"index ")


@dataclass(frozen=True)
class Hunk:
    """One replaced run of lines.

    Args:
        line: Line of the hunk's header in the patch file, from 1.
        start: Index of the first replaced line in the file as it was, from 0.
        new_start: The same in the file as it becomes.
        old: The lines that must be there, with line ends.
        new: The lines that take their place.
    """

    line: int
    start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class Patch:
    """A parsed patch.

    Args:
        name: File name, for messages.
        intro: The text before the first file.
        files: Hunks by path of the file.
    """

    name: str
    intro: str
    files: Mapping[str, tuple[Hunk, ...]]


def parse(name: str, data: bytes) -> Patch:
    """Parse a unified diff.

    Args:
        name: File name, for messages.
        data: Content of the patch file.

    Returns:
        The patch.

    Raises:
        PatchError: The patch is malformed, or makes, deletes or renames a file.
    """
    reader = _Reader(name, data)
    intro = reader.take_while(lambda line: not line.startswith(b"--- "))
    files: dict[str, tuple[Hunk, ...]] = {}
    while reader.peek() is not None:
        path = _file_header(reader)
        if path in files:
            raise reader.error(f"{path} comes twice; its hunks belong together")
        hunks = []
        while (reader.peek() or b"").startswith(b"@@"):
            hunks.append(_hunk(reader))
        if not hunks:
            raise reader.error(f"no hunk for {path}")
        files[path] = tuple(hunks)
        reader.take_while(lambda line: line.startswith(_BETWEEN))
    if not files:
        raise reader.error("no '--- ' line; expected a unified diff")
    return Patch(name, b"".join(intro).decode(errors="replace"), files)


def apply(patch: Patch, path: str, content: bytes) -> bytes:
    """Apply the hunks of one file.

    Args:
        patch: The patch.
        path: The file, as the patch names it.
        content: The file's bytes.

    Returns:
        The patched bytes.

    Raises:
        PatchError: A hunk does not fit exactly where it says.
    """
    lines = io.BytesIO(content).readlines()
    result: list[bytes] = []
    position = 0
    for hunk in patch.files[path]:
        where = f"{patch.name}: line {hunk.line}: hunk for {path}"
        if hunk.start < position:
            raise PatchError(f"{where}: overlaps the hunk before it; sort and merge the hunks")
        for offset, expected in enumerate(hunk.old):
            index = hunk.start + offset
            found = lines[index] if index < len(lines) else None
            if found != expected:
                raise PatchError(
                    f"{where}: does not apply at line {index + 1}: expected {_show(expected)}, "
                    f"found {_show(found)}; the patch was made for other sources: check the pin, "
                    "or make the patch again"
                )
        if hunk.start > len(lines):
            raise PatchError(
                f"{where}: does not apply after line {hunk.start}: the file has {len(lines)} "
                "lines; the patch was made for other sources: check the pin, or make the patch "
                "again"
            )
        result += lines[position : hunk.start]
        if len(result) != hunk.new_start:
            raise PatchError(
                f"{where}: expected the new text at line {len(result) + 1}, its header says "
                f"{hunk.new_start + 1}; make the patch again"
            )
        result += hunk.new
        position = hunk.start + len(hunk.old)
    result += lines[position:]
    return b"".join(result)


class _Reader:
    def __init__(self, name: str, data: bytes) -> None:
        self._name = name
        self._lines = io.BytesIO(data).readlines()
        self.line = 0

    def peek(self) -> bytes | None:
        return self._lines[self.line] if self.line < len(self._lines) else None

    def take(self) -> bytes:
        line = self.peek()
        if line is None:
            raise self.error("ends in the middle of a hunk or header")
        self.line += 1
        return line

    def take_while(self, condition: Callable[[bytes], bool]) -> list[bytes]:
        taken = []
        while (line := self.peek()) is not None and condition(line):
            taken.append(self.take())
        return taken

    def error(self, message: str) -> PatchError:
        return self.error_at(self.line, message)

    def error_at(self, line: int, message: str) -> PatchError:
        return PatchError(f"{self._name}: line {line}: {message}; correct the patch")


def _file_header(reader: _Reader) -> str:
    paths = []
    for mark, prefix in ((b"--- ", "a/"), (b"+++ ", "b/")):
        line = reader.take()
        if not line.startswith(mark):
            raise reader.error(
                f"expected {_show(mark)}, found {_show(line)}; if this line belongs to the hunk "
                "before it, the hunk's header counts too few lines"
            )
        path = line[len(mark) :].rstrip(b"\r\n").split(b"\t")[0].decode(errors="replace")
        if not path.startswith(prefix):
            raise reader.error(f"expected a path below {prefix}, found {path}")
        paths.append(path[len(prefix) :])
    if paths[0] != paths[1]:
        raise reader.error(f"renames {paths[0]} to {paths[1]}; only modifications are supported")
    return paths[0]


def _hunk(reader: _Reader) -> Hunk:
    header = reader.take()
    at = reader.line
    match = _HEADER.match(header)
    if not match:
        raise reader.error(f"expected '@@ -line,count +line,count @@', found {_show(header)}")
    old_line, old_count, new_line, new_count = (int(group or 1) for group in match.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        line = reader.take()
        tag, text = line[:1], line[1:]
        if tag not in (b" ", b"-", b"+"):
            raise reader.error(f"expected ' ', '-' or '+', found {_show(line)}")
        if (reader.peek() or b"").startswith(b"\\"):  # "\ No newline at end of file"
            reader.take()
            text = text.removesuffix(b"\n")
        if tag != b"+":
            old.append(text)
        if tag != b"-":
            new.append(text)
    if len(old) != old_count or len(new) != new_count:
        raise reader.error_at(
            at,
            f"the header counts {old_count} old and {new_count} new lines, the hunk has "
            f"{len(old)} and {len(new)}",
        )
    if old == new:
        raise reader.error_at(at, "the hunk changes nothing")
    # A run of no lines is stated by the line before it.
    start = old_line - (1 if old_count else 0)
    new_start = new_line - (1 if new_count else 0)
    if start < 0 or new_start < 0:
        raise reader.error_at(at, f"lines count from 1; found {_show(header)}")
    return Hunk(at, start, new_start, tuple(old), tuple(new))


def _show(line: bytes | None) -> str:
    return "the end of the file" if line is None else repr(line.decode(errors="replace"))
