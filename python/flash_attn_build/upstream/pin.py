"""The pin: which upstream release is built, and which patches it gets."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import RefusedError
from ..files import ROOT, sha256_of

PIN_FILE = ROOT / "cpp" / "upstream" / "upstream.json"
REFRESH = "run `python -m flash_attn_build.upstream refresh` after a deliberate change"
_SCHEMA = 2
_PATCH = r"[0-9]{4}-[A-Za-z0-9._-]+\.patch"


@dataclass(frozen=True)
class Pin:
    """Content of the data file; the patches lie in `patches/` beside it."""

    path: Path  # the data file
    name: str
    version: str
    sha256: str  # of the source distribution
    tree_sha256: str  # of the used files, by their names in a prepared tree
    patched_tree_sha256: str
    patches: dict[str, str]  # file name and sha256, in the order of application

    def patch_files(self) -> list[Path]:
        """The patches, in the order of application; refuses a folder that is not as listed."""
        there = {path.name: sha256_of(path) for path in found_patches(self.path)}
        for name, sha256 in {**there, **self.patches}.items():
            if there.get(name) != self.patches.get(name):
                raise RefusedError(
                    f"{self.path.parent}/patches/{name}: expected sha256 {sha256} as listed in "
                    f"{self.path.name} and nothing that is not listed, found "
                    f"{there.get(name, 'no file')}; restore it, or {REFRESH}"
                )
        return [self.path.parent / "patches" / name for name in self.patches]


def load_pin(path: Path = PIN_FILE) -> Pin:
    """Reads the data file; refuses one that lacks a field or is of another form."""
    try:
        data = json.loads(path.read_bytes())
        patches = {each["name"]: each["sha256"] for each in data["patches"]}
        hashes = (data["sdist"]["sha256"], data["tree_sha256"], data["patched_tree_sha256"])
        if data["schema"] != _SCHEMA or list(patches) != sorted(patches):
            raise ValueError(f"expected schema {_SCHEMA}, and patches in ascending order")
        for value in (*hashes, *patches.values()):
            if not re.fullmatch("[0-9a-f]{64}", value):
                raise ValueError(f"expected a sha256, got {value!r}")
        return Pin(path, str(data["name"]), str(data["version"]), *hashes, patches)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RefusedError(f"{path}: is not a pin ({error!r}); restore it") from error


def found_patches(path: Path) -> list[Path]:
    """The patches in the folder beside the data file, listed or not, in their order."""
    found = sorted((path.parent / "patches").glob("*"))
    for each in found:
        if not re.fullmatch(_PATCH, each.name):
            raise RefusedError(f"{each}: expected a name of the form {_PATCH}")
    return found
