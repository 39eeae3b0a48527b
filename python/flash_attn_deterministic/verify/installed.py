"""Compares the installed files with their own record and with a wheel."""

from __future__ import annotations

import base64
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
    if not path.is_file():
        raise FileError(f"--wheel: {path} is not a file")
    if path.suffix != ".whl":
        raise FileError(f"--wheel: expected a file that ends in .whl, got {path.name}")
    try:
        project = _project(path)
    except FileError:
        raise
    except Exception as error:  # zipfile's own, and others of a damaged directory
        raise FileError(f"--wheel: {path.name} is not a wheel ({error})") from error
    if project.lower().replace("_", "-") != NAME:
        raise FileError(
            f"--wheel: {path.name} is a wheel of {project or 'nothing known'}, not of {NAME}"
        )
    return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _project(path: Path) -> str:
    """Reads a wheel through, which compares all checksums; returns the name of its project, or
    "".
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            try:
                with archive.open(name) as file:
                    while file.read(2**20):
                        pass
            # Cut off, encrypted, compressed in an unknown way; or whatever a decompressor raises.
            except Exception as error:
                raise FileError(
                    f"--wheel: {path.name} is damaged at {name} ({error or type(error).__name__})"
                ) from error
    return next((found.name or "" for found in metadata.distributions(path=[str(path)])), "")


def inspect(wheel: Wheel | None) -> Installed:
    """Compares the files of the package in use with their record and, if given, a wheel."""
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
            digest = base64.urlsafe_b64encode(hashlib.new(entry.hash.mode, data).digest()).decode()
        except ValueError:
            yield f"{entry}: its hash in RECORD is unreadable"
            continue
        if digest.rstrip("=") != entry.hash.value.rstrip("="):
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
        if file.is_file() and "__pycache__" not in file.parts and name not in inside:
            yield f"{name}: installed, but not in the wheel"


def _few(problems: list[str]) -> tuple[str, ...]:
    more = len(problems) - _SHOWN
    return (*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else []))
