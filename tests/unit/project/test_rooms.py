"""Which part of the package may import which: those that stand before it here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import flash_attn_deterministic as package
import pytest

ROOMS = (
    *("errors", "types", "private", "build_info", "architectures", "schemas"),
    *("tree", "checks", "reference", "ops", "environment", "mode", "interface", "plan"),
    *("distributed", "integrations", "info", "lab", "verify", "__main__"),
)
ROOT = Path(package.__file__).parent


def imports(path: Path) -> Iterator[str]:
    """The rooms that a module imports, also inside of functions; "" is the package itself."""
    inside = [*path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        parts = [*inside[: len(inside) - node.level + 1], *(node.module or "").split(".")]
        parts = [part for part in parts if part]
        if parts:
            yield parts[0]
        else:
            yield from (alias.name if alias.name in ROOMS else "" for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room: str) -> None:
    folder = ROOT / room
    paths = [*folder.rglob("*.py")] if folder.is_dir() else [ROOT / f"{room}.py"]
    assert paths
    below = ROOMS[: ROOMS.index(room) + 1]
    up = {(p.name, other) for p in paths for other in imports(p) if other not in below}
    assert up == set()


def test_every_module_has_a_room() -> None:
    names = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
    assert names - {"__init__"} == set(ROOMS)


def test_names_of_modules_have_no_underscore() -> None:
    """What is public is in __all__ and in docs/api.md."""
    names = {path.stem for path in ROOT.rglob("*.py")} - {"__init__", "__main__"}
    assert {name for name in names if name.startswith("_")} == set()
