"""The pin: which upstream release is built, and which patches it gets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_attn_build.files import write_json
from flash_attn_build.upstream.errors import PinError
from flash_attn_build.upstream.storage import disk_errors

PIN_FILE = Path(__file__).resolve().parents[3] / "cpp" / "upstream" / "upstream.json"
SCHEMA = 1

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_VERSION = re.compile(r"[0-9]+(\.[0-9a-z]+)*")
_PATCH = re.compile(r"[0-9]{4}-[A-Za-z0-9._-]+\.patch")


@dataclass(frozen=True)
class PatchPin:
    """File name and sha256 of one patch."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """Content of the data file.

    Args:
        path: The data file; the patches lie in `patches/` beside it.
        name: Package name.
        version: Package version.
        sha256: Hash of the source distribution.
        size: Size of the source distribution in bytes.
        tree_sha256: Hash over names and bytes of the used files (see `layout.tree_sha256`).
        patches: In the order of application.
    """

    path: Path
    name: str
    version: str
    sha256: str
    size: int
    tree_sha256: str
    patches: tuple[PatchPin, ...]

    @property
    def patches_dir(self) -> Path:
        return self.path.parent / "patches"


def load_pin(path: Path = PIN_FILE) -> Pin:
    """Read and validate the data file.

    Args:
        path: The data file.

    Returns:
        The pin.

    Raises:
        PinError: The file cannot be read, or a field is missing, unknown or malformed.
    """
    data = _object(_read(path), path, "the file")
    _keys(data, {"schema", "name", "version", "sdist", "tree_sha256", "patches"}, path, "the file")
    if data["schema"] != SCHEMA:
        raise PinError(f"{path}: schema: expected {SCHEMA}, got {data['schema']!r}")
    sdist = _object(data["sdist"], path, "sdist")
    _keys(sdist, {"sha256", "size"}, path, "sdist")
    size = sdist["size"]
    if type(size) is not int or size <= 0:
        raise PinError(f"{path}: sdist.size: expected a positive number of bytes, got {size!r}")
    return Pin(
        path=path,
        name=_match(_NAME, data["name"], path, "name"),
        version=_match(_VERSION, data["version"], path, "version"),
        sha256=_match(_SHA256, sdist["sha256"], path, "sdist.sha256"),
        size=size,
        tree_sha256=_match(_SHA256, data["tree_sha256"], path, "tree_sha256"),
        patches=_patches(data["patches"], path),
    )


def read_patches(pin: Pin) -> list[tuple[PatchPin, bytes]]:
    """Read the listed patches and check that the list and the folder agree.

    Args:
        pin: The pin.

    Returns:
        Each patch with its bytes, in the order of application.

    Raises:
        PinError: A patch is listed but missing, present but not listed, or has another hash.
    """
    refresh = "run `python -m flash_attn_build.upstream refresh` after a deliberate change"
    present = _patch_files(pin.patches_dir)
    unlisted = sorted(present - {patch.name for patch in pin.patches})
    if unlisted:
        raise PinError(
            f"{pin.patches_dir}: {', '.join(unlisted)}: present, but not listed in "
            f"{pin.path.name}; delete it, or {refresh}"
        )
    result = []
    for patch in pin.patches:
        if patch.name not in present:
            raise PinError(
                f"{pin.patches_dir}: {patch.name}: listed in {pin.path.name}, but missing; "
                f"restore it, or {refresh}"
            )
        data = (pin.patches_dir / patch.name).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != patch.sha256:
            raise PinError(
                f"{pin.patches_dir / patch.name}: expected sha256 {patch.sha256}, found {found}; "
                f"restore the file, or {refresh}"
            )
        result.append((patch, data))
    return result


def refresh_patches(path: Path = PIN_FILE) -> list[PatchPin]:
    """Rewrite the data file's patch list from the patch folder.

    Args:
        path: The data file.

    Returns:
        The new list, in name order, which is the order of application.

    Raises:
        PinError: The data file is not valid, or a patch's name does not fit.
    """
    pin = load_pin(path)
    patches = [
        PatchPin(
            _match(_PATCH, name, path, "patches"),
            hashlib.sha256((pin.patches_dir / name).read_bytes()).hexdigest(),
        )
        for name in sorted(_patch_files(pin.patches_dir))
    ]
    data = _read(path)
    data["patches"] = [{"name": patch.name, "sha256": patch.sha256} for patch in patches]
    with disk_errors(path, "make its folder writable"):
        write_json(path, data)
    return patches


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise PinError(f"{path}: cannot be read ({error.strerror}); restore it") from error
    except ValueError as error:
        raise PinError(f"{path}: is not JSON ({error}); restore it") from error


def _patch_files(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _patches(value: Any, path: Path) -> tuple[PatchPin, ...]:
    if not isinstance(value, list):
        raise PinError(f"{path}: patches: expected a list, got {value!r}")
    patches = []
    for item in value:
        entry = _object(item, path, "patches[]")
        _keys(entry, {"name", "sha256"}, path, "patches[]")
        name = _match(_PATCH, entry["name"], path, "patches[].name")
        patches.append(PatchPin(name, _match(_SHA256, entry["sha256"], path, f"{name}: sha256")))
    names = [patch.name for patch in patches]
    if names != sorted(set(names)):
        raise PinError(f"{path}: patches: expected unique names in ascending order, got {names}")
    return tuple(patches)


def _object(value: Any, path: Path, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PinError(f"{path}: {where}: expected an object, got {value!r}")
    return value


def _keys(data: Mapping[str, Any], expected: set[str], path: Path, where: str) -> None:
    if set(data) != expected:
        raise PinError(
            f"{path}: {where}: expected the fields {sorted(expected)}, got {sorted(data)}"
        )


def _match(pattern: re.Pattern[str], value: Any, path: Path, where: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise PinError(f"{path}: {where}: expected the form {pattern.pattern}, got {value!r}")
    return value
