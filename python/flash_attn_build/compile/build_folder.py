"""What an earlier build left in its folder, and how much of it the next one may use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files

STAMP = "made_with.json"


def renew(build_dir: Path, made_with: Mapping[str, Any]) -> None:
    """Forgets what CMake remembers of earlier builds; keeps objects that are still good.

    CMake keeps an option until another value is given, so a build without options would go on with
    those of the last one. `cmake --fresh` is no way out: it takes the objects as well. Ninja sees
    when a command or a file has changed, but neither a compiler that was replaced in its place nor
    an environment variable: where those differ, objects go too.

    Args:
        build_dir: The build folder; it need not exist.
        made_with: What objects depend on and Ninja does not see, ready for JSON.
    """
    stamp, state = build_dir / STAMP, build_dir / "CMakeFiles"
    wanted = json.dumps(made_with, indent=2, sort_keys=True) + "\n"
    (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
    same = stamp.exists() and stamp.read_text(encoding="utf-8") == wanted
    # Named by CMake's version: what it found out about compilers.
    for folder in state.glob("[0-9]*") if same else [state]:
        if folder.exists():
            shutil.rmtree(folder)
    files.write_text(stamp, wanted)


def log_dir(build_dir: Path) -> Path:
    """Names the folder inside a build folder for the compiler launcher's records."""
    return build_dir / "launcher"


def read_units(build_dir: Path) -> list[dict[str, Any]]:
    """Reads what the compiler launcher noted of the translation units of this configuration.

    Args:
        build_dir: The build folder, with the compile_commands.json that CMake wrote: objects of an
            earlier configuration may lie there too, and are left out.

    Returns:
        One record per translation unit that was compiled, in the order of outputs.
    """
    commands = json.loads((build_dir / "compile_commands.json").read_text(encoding="utf-8"))
    # CMake writes whole paths there, and the compilers get them relative to the folder.
    outputs = {os.path.relpath(build_dir / command["output"], build_dir) for command in commands}
    records = [json.loads(path.read_text()) for path in log_dir(build_dir).glob("*.json")]
    return sorted(
        (record for record in records if record["output"] in outputs),
        key=lambda record: str(record["output"]),
    )
