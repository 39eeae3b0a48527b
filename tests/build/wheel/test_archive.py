"""One way to pack a wheel: whatever else is in an archive, or how, is refused."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from flash_attn_build.errors import RefusedError
from flash_attn_build.files import ROOT
from flash_attn_build.wheel import archive

INFO = "a-1.dist-info"
CONTENTS = {"a/b.py": b"b", "a/a.py": b"a", f"{INFO}/METADATA": b"m", f"{INFO}/WHEEL": b"w"}
WHOLE = archive.pack(CONTENTS, archive.date_of(1_700_000_001))


def test_pack_and_unpack() -> None:
    contents, date = archive.unpack(WHOLE)
    record = contents.pop(f"{INFO}/RECORD").decode().splitlines()
    assert contents == CONTENTS
    assert list(contents) == ["a/a.py", "a/b.py", f"{INFO}/METADATA", f"{INFO}/WHEEL"]
    assert record[0] == "a/a.py,sha256=ypeBEsobvcr6wjGzmiPcTaeG7_gUfE5yuYB3ha_uSLs,1"
    assert record[-1] == f"{INFO}/RECORD,,"
    assert date == (2023, 11, 14, 22, 13, 20)  # an even second
    assert archive.date_of(0) == (1980, 1, 1, 0, 0, 0)


def test_the_order_of_the_files_has_no_part_in_it() -> None:
    again = dict(reversed(CONTENTS.items())) | {f"{INFO}/RECORD": b"another"}
    assert archive.pack(again, archive.date_of(1_700_000_001)) == WHOLE


def rewritten(change: Callable[[zipfile.ZipInfo], object]) -> bytes:
    """The same files, one of them recorded in another way."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename == "a/a.py":
                change(item)
            new.writestr(item, data)
    return out.getvalue()


ARCHIVES: dict[str, tuple[bytes, str]] = {
    "not one": (b"PK", "cannot be read"),
    "empty": (b"PK\5\6" + bytes(18), "cannot be read"),
    "cut off": (WHOLE[:-9], "cannot be read"),
    "comment of a file": (rewritten(lambda i: setattr(i, "comment", b"x")), "differs at byte"),
    "extra field": (rewritten(lambda i: setattr(i, "extra", b"\1\1\0\0")), "differs at byte"),
    "hidden file": (
        WHOLE.replace(b"PK\1\2", b"PK\3\4" + WHOLE[4:30] + b"a/x.pya" + b"PK\1\2", 1),
        "archive: ",
    ),
}


@pytest.mark.parametrize(("data", "expected"), ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_the_build_does_not_make(data: bytes, expected: str) -> None:
    with pytest.raises(RefusedError, match=expected):
        archive.unpack(data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice() -> None:
    out = io.BytesIO(WHOLE)
    with zipfile.ZipFile(out, "a") as new:
        new.writestr("a/a.py", b"a")
    with pytest.raises(RefusedError, match=r"holds twice: \['a/a\.py'\]"):
        archive.unpack(out.getvalue())


def test_another_compression_library_has_no_part_in_it(tmp_path: Path) -> None:
    """As where zlib-ng stands in for zlib."""
    program = (
        "import sys, zlib\n"
        "zlib.compressobj = None\n"
        "from flash_attn_build.wheel import archive\n"
        f"data = archive.pack({CONTENTS!r}, archive.date_of(1_700_000_001))\n"
        "sys.stdout.buffer.write(data)\n"
    )
    command = [sys.executable, "-c", program]
    environ = {"PYTHONPATH": str(ROOT / "python")}
    assert subprocess.check_output(command, env=environ) == WHOLE
