"""The pin: which upstream release is built, and which patches it gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PinError
from ..files import sha256_of, write_json

PIN_FILE = Path(__file__).resolve().parents[3] / "cpp" / "upstream" / "upstream.json"
SCHEMA = 2
REFRESH = "run `python -m flash_attn_build.upstream refresh` after a deliberate change"

_SHA256 = r"[0-9a-f]{64}"
_PATCH = r"[0-9]{4}-[A-Za-z0-9._-]+\.patch"
_FIELDS = {
    "schema": str(SCHEMA),
    "name": r"[a-z0-9]+(-[a-z0-9]+)*",
    "version": r"[0-9]+(\.[0-9a-z]+)*",
    "sdist.sha256": _SHA256,
    "sdist.size": r"[1-9][0-9]*",
    "tree_sha256": _SHA256,
    "patched_tree_sha256": _SHA256,
    "patches[].name": _PATCH,
    "patches[].sha256": _SHA256,
}


@dataclass(frozen=True)
class Pin:
    """Content of the data file.

    Attributes:
        path: The data file; the patches lie in `patches/` beside it.
        name: Package name.
        version: Package version.
        sha256: Of the source distribution.
        size: Of the source distribution, in bytes.
        tree_sha256: Of the used files, by their names in a prepared tree.
        patched_tree_sha256: The same after the patches.
        patches: File name and sha256 of each, in the order of application.
    """

    path: Path
    name: str
    version: str
    sha256: str
    size: int
    tree_sha256: str
    patched_tree_sha256: str
    patches: tuple[tuple[str, str], ...]

    @property
    def patches_dir(self) -> Path:
        """Folder of the patches."""
        return self.path.parent / "patches"

    def patch_files(self) -> list[Path]:
        """The patches, in the order of application.

        Raises:
            PinError: The list and the folder differ.
        """
        there = {path.name: sha256_of(path) for path in _patches(self.path)}
        for name, sha256 in {**there, **dict(self.patches)}.items():
            if name not in there:
                why = f"listed in {self.path.name}, but missing"
            elif name not in dict(self.patches):
                why = f"present, but not listed in {self.path.name}"
            elif there[name] != sha256:
                why = f"expected sha256 {sha256}, found {there[name]}"
            else:
                continue
            raise PinError(f"{self.patches_dir / name}: {why}; restore it, or {REFRESH}")
        return [self.patches_dir / name for name, _ in self.patches]


def load_pin(path: Path = PIN_FILE) -> Pin:
    """Reads the data file.

    Args:
        path: The data file.

    Returns:
        The pin.

    Raises:
        PinError: The file cannot be read, or a field is missing, unknown or malformed.
    """
    data = _read(path)
    seen = {}
    for name, value in _fields(data, ""):
        pattern = _FIELDS.get(name)
        if pattern is None:
            raise PinError(f"{path}: {name}: expected the fields {sorted(_FIELDS)}")
        wanted = int if name in ("schema", "sdist.size") else str
        if type(value) is not wanted or not re.fullmatch(pattern, str(value)):
            raise PinError(f"{path}: {name}: expected the form {pattern}, got {value!r}")
        seen[name] = value
    lacking = [name for name in _FIELDS if name not in seen and "[]" not in name]
    if lacking or not isinstance(data.get("patches"), list):
        raise PinError(f"{path}: lacks {', '.join(lacking) or 'patches'}")
    try:
        patches = tuple((each["name"], each["sha256"]) for each in data["patches"])
    except LookupError as error:
        raise PinError(f"{path}: patches[]: lacks {error}") from error
    names = [name for name, _ in patches]
    if names != sorted(set(names)):
        raise PinError(f"{path}: patches: expected unique names in ascending order, got {names}")
    return Pin(
        path=path,
        name=data["name"],
        version=data["version"],
        sha256=data["sdist"]["sha256"],
        size=data["sdist"]["size"],
        tree_sha256=data["tree_sha256"],
        patched_tree_sha256=data["patched_tree_sha256"],
        patches=patches,
    )


def write_patches(pin: Pin, patched_tree_sha256: str) -> None:
    """Writes the patch list, as the folder is now, to the data file.

    Args:
        pin: The pin, as loaded.
        patched_tree_sha256: What these patches make of upstream's files.
    """
    patches = [{"name": path.name, "sha256": sha256_of(path)} for path in _patches(pin.path)]
    changes = {"patched_tree_sha256": patched_tree_sha256, "patches": patches}
    write_json(pin.path, {**_read(pin.path), **changes})


def found_patches(pin: Pin) -> list[Path]:
    """The patches that lie in the folder, listed or not, in the order of application.

    Raises:
        PinError: A file is none, by its name.
    """
    found = _patches(pin.path)
    for path in found:
        if not re.fullmatch(_PATCH, path.name):
            raise PinError(f"{path}: expected a name of the form {_PATCH}")
    return found


def _patches(path: Path) -> list[Path]:
    folder = path.parent / "patches"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PinError(f"{path}: cannot be read as JSON ({error}); restore it") from error
    if not isinstance(data, dict):
        raise PinError(f"{path}: expected a JSON object, got {data!r}")
    return data


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no object or list, with its name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _fields(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{name}[]")
    else:
        yield name, value
