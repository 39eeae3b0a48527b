"""One way to pack a wheel: whatever else is in an archive, or how, is refused."""

from __future__ import annotations

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
