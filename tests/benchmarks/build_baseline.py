"""Builds upstream's own kernels as a benchmark fixture, libfa2_baseline.so."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_attn_build import files
from flash_attn_build.compile import jobs, toolchain
from flash_attn_build.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libfa2_baseline.so"
ARCHITECTURE = "90-real"


def build(out: Path, compilations: int, defines: Sequence[str] = ()) -> Path:
    """Builds the benchmark library.

    Args:
        out: Folder for the library, its record baseline.json, and the build's own files.
        compilations: CUDA compilations at once.
        defines: Options of cpp/baseline/CMakeLists.txt, such as "FA2_HEAD_DIMS=64;128".

    Returns:
        Path of the library.

    Raises:
        BuildError: A tool is missing or failed.
    """
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("ninja") is None:
        raise BuildError("cmake, ninja: not on PATH. Install both (pip install cmake ninja).")
    tools = toolchain.find()
    out = out.resolve()
    upstream = prepare(out / "upstream")
    tree = out / "build"
    _run(
        [
            cmake,
            *("-S", str(ROOT / "cpp" / "baseline"), "-B", str(tree), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_CUDA_COMPILER={tools.nvcc}",
            f"-DCMAKE_CUDA_ARCHITECTURES={ARCHITECTURE}",
            f"-DFA2_UPSTREAM_DIR={upstream['dest']}",
            f"-DFA2_JOBS={compilations}",
            *(f"-D{define}" for define in defines),
        ]
    )
    _run([cmake, "--build", str(tree)])
    library = out / LIBRARY
    temporary = library.with_suffix(".tmp")
    shutil.copy2(tree / LIBRARY, temporary)
    os.replace(temporary, library)
    files.write_json(
        out / "baseline.json",
        {
            "upstream": {key: upstream[key] for key in ("version", "sha256")},
            "cuda_toolkit": tools.version,
            "architectures": [ARCHITECTURE],
            "options": list(defines),
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "bytes": library.stat().st_size,
        },
    )
    return library


def prepare(dest: Path) -> dict[str, Any]:
    """Puts upstream's unpatched sources into a folder; returns their version, sha256 and dest.

    Raises:
        BuildError: It failed; its own message is on stderr.
    """
    command = [sys.executable, "-m", "flash_attn_build.upstream", "prepare", "--unpatched"]
    output = _run([*command, "--dest", str(dest)], capture=True)
    record: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return record


def _run(command: Sequence[str], *, capture: bool = False) -> str:
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildError(f"exit status {done.returncode} from: {' '.join(command)}; see above")
    return done.stdout or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns its exit status."""
    name = "python -m tests.benchmarks.build_baseline"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "baseline")
    parser.add_argument("--jobs", type=int, help="CUDA compilations at once")
    words = "an option of cpp/baseline/CMakeLists.txt, such as 'FA2_HEAD_DIMS=64;128'"
    parser.add_argument(
        "-D", "--define", action="append", default=[], metavar="NAME=VALUE", help=words
    )
    options = parser.parse_args(arguments)
    try:
        library = build(options.out, options.jobs or jobs.count(), options.define)
        print(f"{library}: {library.stat().st_size / 1e6:.1f} MB")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
