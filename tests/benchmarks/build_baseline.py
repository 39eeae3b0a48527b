"""Builds upstream's own kernels as a benchmark fixture, libfa2_baseline.so."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_attn_build import files
from flash_attn_build.compile import jobs, toolchain
from flash_attn_build.errors import BuildError, exit_status
from flash_attn_build.upstream.pin import PIN_FILE, load_pin
from flash_attn_build.upstream.prepare import prepare

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
    upstream = prepare(out / "upstream", load_pin(PIN_FILE), patched=False)
    tree = out / "build"
    configure = [
        cmake,
        *("-S", str(files.ROOT / "cpp" / "baseline"), "-B", str(tree), "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CUDA_COMPILER={tools.nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={ARCHITECTURE}",
        f"-DFA2_UPSTREAM_DIR={upstream['dest']}",
        f"-DFA2_JOBS={compilations}",
        *(f"-D{define}" for define in defines),
    ]
    for command in (configure, [cmake, "--build", str(tree)]):
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            raise BuildError(f"exit status {status} from: {' '.join(command)}; see above")
    library = out / LIBRARY
    temporary = library.with_suffix(".tmp")
    shutil.copy2(tree / LIBRARY, temporary)
    os.replace(temporary, library)
    record = {
        "upstream": {key: upstream[key] for key in ("version", "sha256")},
        "cuda_toolkit": tools.version,
        "architectures": [ARCHITECTURE],
        "options": list(defines),
        "sha256": files.sha256_of(library),
        "bytes": library.stat().st_size,
    }
    files.write_json(out / "baseline.json", record)
    return library


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns its exit status."""
    name = "python -m tests.benchmarks.build_baseline"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--out", type=Path, default=files.ROOT / "build" / "baseline")
    parser.add_argument("--jobs", type=int, help="CUDA compilations at once")
    words = "an option of cpp/baseline/CMakeLists.txt, such as 'FA2_HEAD_DIMS=64;128'"
    parser.add_argument(
        "-D", "--define", action="append", default=[], metavar="NAME=VALUE", help=words
    )
    options = parser.parse_args(arguments)

    def work() -> None:
        library = build(options.out.resolve(), options.jobs or jobs.count(), options.define)
        print(f"{library}: {library.stat().st_size / 1e6:.1f} MB")

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
