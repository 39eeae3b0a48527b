from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from flash_attn_deterministic.verify import installed
from flash_attn_deterministic.verify.installed import FileError, inspect, read_wheel

PACKAGE = "flash_attn_deterministic"
INFO = f"{PACKAGE}-0.1.0.dist-info"
METADATA = b"Metadata-Version: 2.4\nName: flash-attn-deterministic\nVersion: 0.1.0\n"
FILES: Mapping[str, bytes] = {
    f"{PACKAGE}/__init__.py": b"",
    f"{PACKAGE}/_C.so": b"machine code",
    f"{PACKAGE}/verify/installed.py": b"",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\n",
}


def record(files: Mapping[str, bytes]) -> bytes:
    def line(name: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(data)}\n"

    text = "".join(line(*item) for item in files.items())
    return (text + f"{INFO}/RECORD,,\n../../bin/flash-attn-deterministic,sha256=AA,3\n").encode()


def make_wheel(
    folder: Path, files: Mapping[str, bytes] = FILES, compression: int = zipfile.ZIP_STORED
) -> Path:
    path = folder / f"{PACKAGE}-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in {**files, f"{INFO}/RECORD": record(files)}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of FILES, which the code under test takes for its own."""
    root = tmp_path / "site-packages"
    for name, data in {**FILES, f"{INFO}/RECORD": record(FILES)}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(installed, "__file__", str(root / PACKAGE / "verify" / "installed.py"))
    return root


def test_the_installation_is_the_wheels(site: Path, tmp_path: Path) -> None:
    (site / PACKAGE / "__pycache__").mkdir()
    (site / PACKAGE / "__pycache__" / "a.pyc").write_bytes(b"compiled here")
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert found == installed.Installed("0.1.0", False, len(FILES), (), True)


def test_without_a_wheel_the_record_counts(site: Path) -> None:
    assert inspect(None) == installed.Installed("0.1.0", False, len(FILES), (), None)


def test_a_changed_file(site: Path, tmp_path: Path) -> None:
    (site / PACKAGE / "_C.so").write_bytes(b"other code")
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert found.matches_wheel is False
    assert any("_C.so: differs from the installation's RECORD" in p for p in found.problems)
    assert any("_C.so: not the bytes of the wheel" in p for p in found.problems)


def test_a_missing_file(site: Path, tmp_path: Path) -> None:
    (site / PACKAGE / "_C.so").unlink()
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert found.matches_wheel is False
    assert any("_C.so: in the wheel, but not installed" in p for p in found.problems)


def test_a_file_too_many(site: Path, tmp_path: Path) -> None:
    (site / PACKAGE / "left_over.py").write_bytes(b"")
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert found.matches_wheel is False
    assert found.problems == (f"{PACKAGE}/left_over.py: installed, but not in the wheel",)


def test_another_wheel_of_the_same_name(site: Path, tmp_path: Path) -> None:
    other = make_wheel(tmp_path, {**FILES, f"{PACKAGE}/_C.so": b"of another build"})
    found = inspect(read_wheel(other))
    assert found.matches_wheel is False
    assert found.problems == (f"{PACKAGE}/_C.so: not the bytes of the wheel",)


def test_many_problems_are_counted(site: Path, tmp_path: Path) -> None:
    for number in range(9):
        (site / PACKAGE / f"extra{number}.py").write_bytes(b"")
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert len(found.problems) == 6
    assert found.problems[-1] == "and 4 more"


def test_a_source_tree(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "python" / PACKAGE / "verify" / "installed.py"
    monkeypatch.setattr(installed, "__file__", str(tree))
    assert inspect(None).source_tree is True


def test_an_editable_installation_is_a_source_tree(site: Path) -> None:
    (site / INFO / "direct_url.json").write_text('{"url": "x", "dir_info": {"editable": true}}')
    assert inspect(None).source_tree is True


def not_a_file(folder: Path) -> Path:
    return folder / "missing.whl"


def no_wheel_name(folder: Path) -> Path:
    (folder / "notes.txt").write_text("text")
    return folder / "notes.txt"


def no_archive(folder: Path) -> Path:
    (folder / "broken.whl").write_text("text")
    return folder / "broken.whl"


def of_another_project(folder: Path) -> Path:
    return make_wheel(folder, {f"{INFO}/METADATA": METADATA.replace(b"flash-attn", b"other")})


def without_metadata(folder: Path) -> Path:
    return make_wheel(folder, {"a.py": b""})


def damaged(folder: Path) -> Path:
    path = make_wheel(folder)
    path.write_bytes(path.read_bytes().replace(b"machine code", b"machine cope"))
    return path


CODE = bytes(range(256)) * 16  # long enough to be worth compressing


def changed(path: Path, place: int, data: bytes) -> Path:
    """Overwrites bytes of a file."""
    content = bytearray(path.read_bytes())
    content[place : place + len(data)] = data
    path.write_bytes(content)
    return path


def deflated(folder: Path) -> Path:
    return make_wheel(folder, {**FILES, f"{PACKAGE}/_C.so": CODE}, zipfile.ZIP_DEFLATED)


def changed_lzma(folder: Path) -> Path:
    path = make_wheel(folder, {f"{PACKAGE}/_C.so": CODE}, zipfile.ZIP_LZMA)
    data = 30 + len(f"{PACKAGE}/_C.so")  # after the header of the first file
    return changed(path, data + 12, b"\xff" * 8)


def without_the_end(folder: Path) -> Path:
    path = deflated(folder)
    path.write_bytes(path.read_bytes()[:-40])
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(not_a_file, "missing.whl is not a file", id="missing"),
        pytest.param(no_wheel_name, "expected a file that ends in .whl", id="name"),
        pytest.param(no_archive, "broken.whl is not a wheel", id="no-archive"),
        pytest.param(of_another_project, "is a wheel of other-deterministic", id="other"),
        pytest.param(without_metadata, "is a wheel of nothing known", id="no-metadata"),
        pytest.param(damaged, f"is damaged at {PACKAGE}/_C.so", id="damaged"),
        pytest.param(changed_lzma, f"is damaged at {PACKAGE}/_C.so", id="lzma"),
        pytest.param(without_the_end, "0.1.0-py3-none-any.whl is not a wheel", id="no-end"),
    ],
)
def test_what_is_no_wheel_of_ours(make: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=words):
        read_wheel(make(tmp_path))  # type: ignore[operator]


def test_any_byte_may_be_damaged(tmp_path: Path) -> None:
    """Either nothing that counts is lost, or the file is refused; nothing else is raised."""
    path = deflated(tmp_path)
    whole = path.read_bytes()
    refused = []
    for place in range(0, len(whole), 2):  # fields of a zip file have two bytes or more
        path.write_bytes(whole)
        changed(path, place, bytes([whole[place] ^ 0xFF]))
        try:
            read_wheel(path)
        except FileError as error:
            refused.append(str(error))
    assert len(refused) > len(whole) / 4
    assert all(path.name in words for words in refused)
