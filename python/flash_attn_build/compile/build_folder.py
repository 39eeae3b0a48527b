"""The folder of a build: what an earlier one left there, what its units cost."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files

STAMP = "made_with.json"
LOG = ".ninja_log"  # cmake/Progress.cmake begins it
# Environment variables that change what compilers make; those of clang count for zig, too.
_VARIABLES = re.compile(
    "CCC_OVERRIDE_OPTIONS|COMPILER_PATH|CPATH|C(PLUS)?_INCLUDE_PATH|GCC_EXEC_PREFIX|LD_PRELOAD"
    "|LDFLAGS|LIBRARY_PATH|C(XX)?FLAGS|CUDAFLAGS|CUDAHOSTCXX|(NVCC|SKBUILD|ZIG)_.*"
    # But for those that change only how fast a build is and what it prints.
    "|CMAKE_(?!BUILD_PARALLEL_LEVEL$|COLOR_DIAGNOSTICS$|EXPORT_COMPILE_COMMANDS$).*"
)


def influences(environ: Mapping[str, str]) -> dict[str, str]:
    """Picks the variables that can change a wheel, and that sources and options do not show.

    CUDACXX, CXX and the like are among them only where they hold options, as in "g++ -ffast-math":
    the manifest has the compilers' versions.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if (_VARIABLES.fullmatch(name) and value.strip())
        or (name in ("CC", "CXX", "CUDACXX") and re.search(r"(^|\s)-", value))
    }


def drop_stale_state(build_dir: Path, made_with: Mapping[str, Any]) -> None:
    """Removes what CMake stored in earlier builds; keeps objects that are still valid.

    CMake keeps an option until another value is given, so a build without options would use those
    of the last one. `cmake --fresh` would remove the objects as well. Ninja notices a changed
    command or file, but not `made_with`: a compiler that was replaced under the same path, an
    environment variable. Where those differ, objects are removed too.
    """
    stamp, state = build_dir / STAMP, build_dir / "CMakeFiles"
    wanted = json.dumps(made_with, indent=2, sort_keys=True) + "\n"
    (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
    same = stamp.exists() and stamp.read_text(encoding="utf-8") == wanted
    # Folders named by CMake's version hold what it detected of the compilers.
    for folder in state.glob("[0-9]*") if same else [state]:
        shutil.rmtree(folder, ignore_errors=True)
    files.write_text(stamp, wanted)


def read_units(build_dir: Path) -> list[dict[str, Any]]:
    """Reads output, command and seconds of the translation units of this configuration.

    Objects of an earlier configuration may lie in the folder too, and are left out.
    """
    log = (build_dir / LOG).read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in log]
    took = {row[3]: (int(row[1]) - int(row[0])) / 1000 for row in rows}  # the last of each
    units = []
    for unit in json.loads((build_dir / "compile_commands.json").read_text(encoding="utf-8")):
        # CMake writes whole paths there, and Ninja's are relative to the folder.
        output = os.path.relpath(build_dir / unit["output"], build_dir)
        command = shlex.split(unit["command"])
        if output in took:  # not where a target is left out of the build
            units.append({"output": output, "wall_seconds": took[output], "command": command})
    return sorted(units, key=lambda unit: str(unit["output"]))
