"""The pin: which upstream release is built, and which patches it gets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import RefusedError, first_of
from ..files import ROOT, sha256_of

PIN_FILE = ROOT / "cpp" / "upstream" / "upstream.json"
REFRESH = "run `python -m flash_attn_build.upstream refresh` after a deliberate change"


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
        if list(there.items()) != list(self.patches.items()):
            differing = {name for name, _ in there.items() ^ self.patches.items()}
            raise RefusedError(
                f"{self.path.parent}/patches: not those that {self.path.name} lists "
                f"({first_of(differing)}); restore them, or {REFRESH}"
            )
        return [self.path.parent / "patches" / name for name in self.patches]


def load_pin(path: Path = PIN_FILE) -> Pin:
    """Reads the data file; refuses one that lacks a field."""
    try:
        data = json.loads(path.read_bytes())
        hashes = (data["sdist"]["sha256"], data["tree_sha256"], data["patched_tree_sha256"])
        patches = {each["name"]: each["sha256"] for each in data["patches"]}
        return Pin(path, data["name"], data["version"], *hashes, patches)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RefusedError(f"{path}: is not a pin ({error!r}); restore it") from error


def found_patches(path: Path) -> list[Path]:
    """The patches in the folder beside the data file, listed or not, in their order."""
    return sorted((path.parent / "patches").iterdir())
