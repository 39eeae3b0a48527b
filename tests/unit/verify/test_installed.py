from __future__ import annotations

import base64
import compileall
import hashlib
import marshal
import py_compile
import zipfile
from collections.abc import Callable, Mapping
from inspect import CO_GENERATOR
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
    for level in (0, 1, 2):
        assert compileall.compile_dir(site / PACKAGE, quiet=1, optimize=level)
    other_python = site / PACKAGE / "__pycache__" / "__init__.cpython-399.pyc"
    other_python.write_bytes(bytes(16) + b"not read by this one")
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert found == installed.Installed("0.1.0", False, len(FILES), (), True)


def test_without_a_wheel_the_record_counts(site: Path) -> None:
    assert inspect(None) == installed.Installed("0.1.0", False, len(FILES), (), None)


@pytest.mark.parametrize(("name", "data", "of_wheel", "of_record"), [
    pytest.param("_C.so", b"other", "not the bytes of the wheel", "differs from", id="changed"),
    pytest.param("_C.so", None, "in the wheel, but not inst", "cannot be read", id="missing"),
    pytest.param("left.py", b"", "installed, but not in the wheel", "", id="too-many"),
])  # fmt: skip
def test_files_that_are_not_the_wheels(
    name: str, data: bytes | None, of_wheel: str, of_record: str, site: Path, tmp_path: Path
) -> None:
    if data is None:
        (site / PACKAGE / name).unlink()
    else:
        (site / PACKAGE / name).write_bytes(data)
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert found.matches_wheel is False
    own = [problem for problem in found.problems if problem.startswith(f"{PACKAGE}/{name}: ")]
    assert own == list(found.problems)
    assert of_wheel in own[-1]
    assert of_record in own[0]
    assert len(own) == 1 + bool(of_record)


def test_another_wheel_of_the_same_name(site: Path, tmp_path: Path) -> None:
    other = make_wheel(tmp_path, {**FILES, f"{PACKAGE}/_C.so": b"of another build"})
    found = inspect(read_wheel(other))
    assert found.matches_wheel is False
    assert found.problems == (f"{PACKAGE}/_C.so: not the bytes of the wheel",)


TIMESTAMP = py_compile.PycInvalidationMode.TIMESTAMP
OTHER = "not the code of its source"


def cached(
    mode: py_compile.PycInvalidationMode, change: Callable[[bytes], bytes], words: str
) -> Callable[[Path], str]:
    """Cached code of a module, whose header fits the module's source."""

    def put(site: Path) -> str:
        source = str(site / PACKAGE / "__init__.py")
        file = Path(py_compile.compile(source, doraise=True, invalidation_mode=mode) or "")
        file.write_bytes(change(file.read_bytes()))
        return f"{file.relative_to(site)}: {words}"

    return put


def other_code(data: bytes) -> bytes:
    return data[:16] + marshal.dumps(compile("evil = 1\n", "__init__.py", "exec"))


def other_flags(data: bytes) -> bytes:
    code = marshal.loads(data[16:])
    return data[:16] + marshal.dumps(code.replace(co_flags=code.co_flags | CO_GENERATOR))


def file_in_cache(name: str) -> Callable[[Path], str]:
    def put(site: Path) -> str:
        file = site / PACKAGE / "__pycache__" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
        return f"{PACKAGE}/__pycache__/{name}: not the cached code of a module"

    return put


def link(name: str, to: str) -> Callable[[Path], str]:
    def put(site: Path) -> str:
        (site.parent / "elsewhere").mkdir()
        (site / PACKAGE / name).symlink_to(to)
        return f"{PACKAGE}/{name}: a symbolic link"

    return put


def row(text: str, words: str) -> Callable[[Path], str]:
    def put(site: Path) -> str:
        with (site / INFO / "RECORD").open("a") as file:
            file.write(text)
        return words

    return put


@pytest.mark.parametrize("plant", [
    pytest.param(cached(py_compile.PycInvalidationMode.UNCHECKED_HASH, bytes,
        "cached code that Python uses whatever its source says"), id="pyc-unchecked-hash"),
    pytest.param(cached(py_compile.PycInvalidationMode.CHECKED_HASH, other_code, OTHER),
        id="pyc-checked-hash"),
    pytest.param(cached(TIMESTAMP, other_code, OTHER), id="pyc-same-time"),
    pytest.param(cached(TIMESTAMP, other_flags, OTHER), id="pyc-flags"),
    pytest.param(cached(TIMESTAMP, lambda data: data[:20], "cannot be read"), id="pyc-cut-off"),
    pytest.param(link("verify/installed", "../../../elsewhere"), id="link-to-folder"),
    pytest.param(link("__pycache__", "../../elsewhere"), id="link-for-cache"),
    pytest.param(link("other.py", "__init__.py"), id="link-to-file"),
    pytest.param(file_in_cache("evil.py"), id="cache-py"),
    pytest.param(file_in_cache("__init__.cpython-311.py"), id="cache-py-of-module"),
    pytest.param(file_in_cache("evil.cpython-311.pyc"), id="cache-of-no-module"),
    pytest.param(row(f"{PACKAGE}/__init__.py,shake_128=,0\n", "hash in RECORD is unreadable"),
        id="record-shake"),
    pytest.param(row(f"{PACKAGE}/__init__.py,,0,4,5\n", "RECORD: a row is malformed"),
        id="record-fields"),
    pytest.param(row(f"{PACKAGE}/__init__.py,,many\n", "RECORD: a row is malformed"),
        id="record-size"),
    pytest.param(row(f"{PACKAGE}/other.py,sha256=AA,-1\n", "RECORD: a row is malformed"),
        id="record-negative-size"),
    pytest.param(row(f"{PACKAGE}/__init__.py,sha256=AA,1\n",
        "differs from the installation's RECORD"), id="record-twice"),
])  # fmt: skip
def test_what_is_planted_is_a_problem(
    plant: Callable[[Path], str], site: Path, tmp_path: Path
) -> None:
    words = plant(site)
    found = inspect(read_wheel(make_wheel(tmp_path)))
    assert any(words in problem for problem in found.problems), found.problems
    assert found.matches_wheel is ("RECORD" in words)


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


def text_named(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text("text")
        return folder / name

    return make


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


@pytest.mark.parametrize(("make", "words"), [
    pytest.param(lambda folder: folder / "missing.whl", r"ends in \.whl, got .*missing\.whl",
        id="missing"),
    pytest.param(text_named("notes.txt"), "expected a file that ends in .whl", id="name"),
    pytest.param(text_named("broken.whl"), "broken.whl is damaged, or not a wheel",
        id="no-archive"),
    pytest.param(of_another_project, "is a wheel of other-deterministic", id="other"),
    pytest.param(without_metadata, "is a wheel of nothing known", id="no-metadata"),
    pytest.param(damaged, f"is damaged at {PACKAGE}/_C.so", id="damaged"),
    pytest.param(changed_lzma, "is damaged, or not a wheel .*Corrupt", id="lzma"),
])  # fmt: skip
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
