"""Compares the installed files with their own record and with a wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import marshal
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any

from ..errors import FlashAttnError

NAME = "flash-attn-deterministic"
PACKAGE = "flash_attn_deterministic"
_SHOWN = 5  # problems in a message


class FileError(FlashAttnError, ValueError):
    """The file named is not what it should be: a wheel of this package, for instance."""


class NotInstalledError(FlashAttnError, RuntimeError):
    """The package in use is not the installed one, or not that of the wheel."""


@dataclass(frozen=True)
class Installed:
    """What is known of the installed files."""

    version: str  # of the installed distribution; "" for a source tree
    source_tree: bool  # whether the package runs from a source tree
    files: int  # how many files were compared
    problems: tuple[str, ...]  # what differs from the record, or from the wheel
    matches_wheel: bool | None  # whether the files are those of the wheel; None: no wheel was named


@dataclass(frozen=True)
class Wheel:
    """A wheel file."""

    path: Path
    sha256: str

    def record(self) -> dict[str, str]:
        """Returns how results name it."""
        return {"name": self.path.name, "sha256": self.sha256}


def read_wheel(path: Path) -> Wheel:
    """Checks that a file is a wheel of this package.

    Raises:
        FileError: it is not.
    """
    if not path.is_file() or path.suffix != ".whl":
        raise FileError(f"--wheel: expected a file that ends in .whl, got {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # compares all checksums
                raise FileError(f"--wheel: {path.name} is damaged at {damaged}")
        found = next(iter(metadata.distributions(path=[str(path)])), None)
        project = (found and found.name) or "nothing known"
    except FileError:
        raise
    except Exception as error:  # zipfile's own, and whatever a decompressor raises
        raise FileError(f"--wheel: {path.name} is damaged, or not a wheel ({error!r})") from error
    if project.lower().replace("_", "-") != NAME:
        raise FileError(f"--wheel: {path.name} is a wheel of {project}, not of {NAME}")
    return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest())


def inspect(wheel: Wheel | None) -> Installed:
    """Compares the files of the package in use with their record and, if given, a wheel."""
    package = Path(__file__).resolve().parents[1]
    matches = None if wheel is None else False
    try:
        distribution = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return Installed("", True, 0, (), matches)
    root = Path(str(distribution.locate_file(""))).resolve()
    if package != root / PACKAGE or _editable(distribution):
        return Installed(distribution.version, True, 0, (), matches)
    try:
        own = _own_files(distribution)
    except (TypeError, ValueError, csv.Error) as error:
        own, problems = [], [f"RECORD: a row is malformed ({error})"]
    else:
        problems = list(_record_problems(own, root))
    if wheel is not None:
        differences = list(_wheel_problems(wheel.path, root))
        problems += differences
        matches = not differences
    return Installed(distribution.version, False, len(own), _few(problems), matches)


def check(found: Installed, wheel: Wheel | None, allow_source: bool) -> None:
    """Checks that the package in use is installed, and from the wheel if one is given.

    Raises:
        NotInstalledError: it is not.
    """
    if found.source_tree and not allow_source:
        raise NotInstalledError(
            "this package runs from a source tree; install the wheel that you want to verify, and "
            "run this outside of the tree"
        )
    if wheel is not None and found.matches_wheel is False and not found.source_tree:
        raise NotInstalledError(
            f"--wheel: the installed files are not those of {wheel.path.name}: "
            + "; ".join(found.problems)
            + "; install it with pip install --force-reinstall --no-deps"
        )


def _editable(distribution: metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    if not text:
        return False
    try:
        return bool(json.loads(text).get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def _own_files(distribution: metadata.Distribution) -> list[tuple[str, metadata.FileHash]]:
    """Returns paths and hashes of what came with the wheel: not RECORD, caches and launchers.

    `distribution.files` would leave out those that are missing, from Python 3.12 on.
    """
    own = []
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        path, digest, size = row
        if int(size or 0) < 0:
            raise ValueError(f"{path} of {size} bytes")
        if digest and ".." not in PurePosixPath(path).parts:
            own.append((path, metadata.FileHash(digest)))
    return own


def _record_problems(own: list[tuple[str, metadata.FileHash]], root: Path) -> Iterator[str]:
    if not own:
        yield "the installation has no RECORD"
    for entry, recorded in own:
        try:
            data = (root / entry).read_bytes()
        except OSError as error:
            yield f"{entry}: cannot be read ({error.strerror})"
            continue
        try:
            digest = base64.urlsafe_b64encode(hashlib.new(recorded.mode, data).digest()).decode()
        except (TypeError, ValueError):  # shake_128 and its like ask for a length
            yield f"{entry}: its hash in RECORD is unreadable"
            continue
        if digest.rstrip("=") != recorded.value.rstrip("="):
            yield f"{entry}: differs from the installation's RECORD"


def _wheel_problems(path: Path, root: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            # Installers write their own RECORD, and put what is under .data elsewhere.
            if name.endswith(".dist-info/RECORD") or ".data/" in name:
                continue
            try:
                same = (root / name).read_bytes() == archive.read(name)
            except OSError:
                yield f"{name}: in the wheel, but not installed"
                continue
            if not same:
                yield f"{name}: not the bytes of the wheel"
    inside = set(names)
    for file in sorted((root / PACKAGE).rglob("*")):
        name = str(PurePosixPath(file.relative_to(root)))
        if file.is_symlink():  # of a folder, too: it would come before the module of its name
            yield f"{name}: a symbolic link"
        elif file.is_dir():
            continue
        elif "__pycache__" in name.split("/"):
            yield from _cache_problems(file, name)
        elif name not in inside:
            yield f"{name}: installed, but not in the wheel"


# The header of a cached file proves nothing of its code: whoever writes the file can copy time,
# size or hash from the source. So the code itself is compared with the source's. That holds for
# every process that runs the package; a fresh pycache_prefix for the worker would leave out this
# one, and have all of torch compiled anew in each run.
def _cache_problems(file: Path, name: str) -> Iterator[str]:
    match = re.fullmatch(r"(\w+)\.cpython-\w+(?:\.opt-([12]))?\.pyc", file.name)
    source = file.parents[1] / f"{match[1]}.py" if match else file
    if match is None or not source.is_file():
        yield f"{name}: not the cached code of a module"
        return
    try:
        data = file.read_bytes()
        if int.from_bytes(data[4:8], "little") & 3 == 1:
            yield f"{name}: cached code that Python uses whatever its source says; remove it"
        elif data[:4] == importlib.util.MAGIC_NUMBER:  # of another Python: this one ignores it
            level = int(match[2] or 0)
            code = compile(source.read_bytes(), source, "exec", dont_inherit=True, optimize=level)
            if _parts(marshal.loads(data[16:])) != _parts(code):
                yield f"{name}: not the code of its source; remove it"
    except Exception as error:  # whatever damaged code raises
        yield f"{name}: cannot be read ({error or type(error).__name__})"


def _parts(code: CodeType) -> list[Any]:
    """Returns what runs of a code object: == alone leaves out flags, such as a generator's, and in
    some Pythons the table of exceptions.
    """
    inner = [_parts(one) for one in code.co_consts if isinstance(one, CodeType)]
    table = getattr(code, "co_exceptiontable", b"")  # Python 3.11 and later
    return [code, code.co_flags, code.co_stacksize, table, *inner]


def _few(problems: list[str]) -> tuple[str, ...]:
    more = len(problems) - _SHOWN
    return (*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else []))
