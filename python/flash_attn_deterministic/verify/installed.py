"""The installed files, held to their own record and to a wheel."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from ..errors import FlashAttnError

NAME = "flash-attn-deterministic"
PACKAGE = "flash_attn_deterministic"
_SHOWN = 5  # problems of a kind that are told


class FileError(FlashAttnError, ValueError):
    """The file named is not what it should be: a wheel of this package, for instance."""


class NotInstalledError(FlashAttnError, RuntimeError):
    """The package in use is not the installed one, or not that of the wheel."""


@dataclass(frozen=True)
class Installed:
    """What is known of the installed files.

    Args:
        version: of the installed distribution; "" for a source tree.
        source_tree: whether the package runs from a source tree.
        files: how many files were compared.
        problems: what differs from the record, or from the wheel.
        matches_wheel: whether the files are those of the wheel; None: no wheel was named.
    """

    version: str
    source_tree: bool
    files: int
    problems: tuple[str, ...]
    matches_wheel: bool | None


@dataclass(frozen=True)
class Wheel:
    """A wheel file."""

    path: Path
    sha256: str


def read_wheel(path: Path) -> Wheel:
    """Looks whether a file is a wheel of this package.

    Raises:
        FileError: it is not.
    """
    if not path.is_file():
        raise FileError(f"--wheel: {path} is not a file")
    if path.suffix != ".whl":
        raise FileError(f"--wheel: expected a file that ends in .whl, got {path.name}")
    try:
        text = _metadata(path)
    except FileError:
        raise
    except Exception as error:  # zipfile's own, and what it lets through of a broken directory
        raise FileError(f"--wheel: {path.name} is not a wheel ({error})") from error
    project = next((x[5:].strip() for x in text.splitlines() if x.startswith("Name:")), "")
    if project.lower().replace("_", "-") != NAME:
        raise FileError(
            f"--wheel: {path.name} is a wheel of {project or 'nothing known'}, not of {NAME}"
        )
    return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _metadata(path: Path) -> str:
    """Reads a wheel through, which compares all checksums.

    Returns:
        The metadata; "" if there are none.

    Raises:
        FileError: a file in it cannot be read.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for name in names:
            try:
                with archive.open(name) as file:
                    while file.read(2**20):
                        pass
            # Cut off, encrypted, compressed in an unknown way; or whatever a decompressor raises.
            except Exception as error:
                raise FileError(
                    f"--wheel: {path.name} is damaged at {name} ({error or type(error).__name__})"
                ) from error
        found = [n for n in names if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
        return archive.read(found[0]).decode() if found else ""


def inspect(wheel: Wheel | None) -> Installed:
    """Compares the files of the package in use with their record and, if given, with a wheel."""
    package = Path(__file__).resolve().parents[1]
    try:
        distribution = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return Installed("", True, 0, (), None if wheel is None else False)
    root = Path(str(distribution.locate_file(""))).resolve()
    if package != root / PACKAGE or _editable(distribution):
        return Installed(distribution.version, True, 0, (), None if wheel is None else False)
    problems = list(_record_problems(distribution, root))
    files = len(_own_files(distribution))
    matches = None
    if wheel is not None:
        differences = list(_wheel_problems(wheel.path, root))
        problems += differences
        matches = not differences
    return Installed(distribution.version, False, files, _few(problems), matches)


def _editable(distribution: metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    if not text:
        return False
    try:
        return bool(json.loads(text).get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def _own_files(distribution: metadata.Distribution) -> list[metadata.PackagePath]:
    """Returns the recorded files that came with the wheel: not RECORD, caches and launchers."""
    files = distribution.files or ()
    return [file for file in files if file.hash is not None and ".." not in file.parts]


def _record_problems(distribution: metadata.Distribution, root: Path) -> Iterator[str]:
    if not distribution.files:
        yield "the installation has no RECORD"
    for entry in _own_files(distribution):
        assert entry.hash is not None
        try:
            data = (root / str(entry)).read_bytes()
        except OSError as error:
            yield f"{entry}: cannot be read ({error.strerror})"
            continue
        try:
            digest = hashlib.new(entry.hash.mode, data).digest()
            expected = base64.urlsafe_b64decode(
                entry.hash.value + "=" * (-len(entry.hash.value) % 4)
            )
        except (ValueError, binascii.Error):
            yield f"{entry}: its hash in RECORD is unreadable"
            continue
        if digest != expected:
            yield f"{entry}: differs from the installation's RECORD"


def _wheel_problems(path: Path, root: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            # Installers write RECORD anew, and put what is under .data elsewhere.
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
        if file.is_file() and "__pycache__" not in file.parts and name not in inside:
            yield f"{name}: installed, but not in the wheel"


def _few(problems: list[str]) -> tuple[str, ...]:
    more = len(problems) - _SHOWN
    return (*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else []))
