"""Upstream's own kernels as a benchmark fixture, and what upstream's own files cost to compile.

`python -m tests.benchmarks.build_baseline` builds libfa2_baseline.so; with `--cost` it instead
compiles some of upstream's files as upstream ships them, for the release's architectures.
"""

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
from flash_attn_build.compile import jobs, launcher, toolchain
from flash_attn_build.errors import BuildError, SettingError

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libfa2_baseline.so"
ARCHITECTURE = "90-real"
COST_ARCHITECTURES = ("80-real", "90-real", "90-virtual")
COST_TUS = ("fwd_hdim64_bf16", "fwd_hdim128_bf16_causal", "fwd_split_hdim128_bf16")
COST_RESULT = ROOT / "docs" / "results" / "build_cost_upstream.json"

# Upstream's own backward files need more memory to compile than anything in the wheel.
PEAK_BYTES_PER_COMPILATION = 6 * jobs.GIB

# As in upstream's setup.py, less its -U flags: they undo definitions that only torch's extension
# builder makes.
_UPSTREAM_FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
)
_COMMON_FLAGS = ("--compress-mode=size", "--diag-suppress=174,177,186,221", "-Xcompiler=-fPIC")


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
    tree, log = out / "build", out / "log"
    start = [sys.executable, "-I", "-S", launcher.__file__, "--log-dir", str(log), "--"]
    _run(
        [
            cmake,
            *("-S", str(ROOT / "cpp" / "baseline"), "-B", str(tree), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_CUDA_COMPILER={tools.nvcc}",
            f"-DCMAKE_CUDA_ARCHITECTURES={ARCHITECTURE}",
            f"-DCMAKE_CUDA_COMPILER_LAUNCHER={';'.join(start)}",
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
            "translation_units": read_costs(log),
        },
    )
    return library


def cost(out: Path, tus: Sequence[str]) -> dict[str, Any]:
    """Compiles some of upstream's own files, nothing switched off, and records the cost of each.

    Args:
        out: Folder for the sources and the objects.
        tus: Names as in COST_TUS: upstream's file names without "flash_" and "_sm80.cu".

    Returns:
        The record for docs/results/build_cost_upstream.json.

    Raises:
        BuildError: A name upstream does not have, or a compilation that failed.
    """
    tools = toolchain.find()
    out = out.resolve()
    upstream = prepare(out / "upstream")
    sources = {tu: source_of(Path(upstream["dest"]), tu) for tu in tus}
    log = out / "cost"
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    flags = [*_UPSTREAM_FLAGS, *_COMMON_FLAGS, *architecture_flags(COST_ARCHITECTURES)]
    includes = include_flags(Path(upstream["dest"]))
    for tu, source in sources.items():
        command = [str(tools.nvcc), *flags, *includes, "-c", str(source), "-o", f"{tu}.o"]
        start = [sys.executable, "-I", "-S", launcher.__file__, "--log-dir", str(log), "--"]
        _run([*start, *command], cwd=log)
        print(f"{tu}: done", flush=True)
    return {
        "upstream": {key: upstream[key] for key in ("version", "sha256")},
        "cuda_toolkit": tools.version,
        "architectures": list(COST_ARCHITECTURES),
        "flags": flags,
        "cores": jobs.usable_cores(),
        "translation_units": read_costs(log),
    }


def prepare(dest: Path) -> dict[str, Any]:
    """Puts upstream's unpatched sources into a folder; returns their version, sha256 and dest.

    Raises:
        BuildError: It failed; its own message is on stderr.
    """
    command = [sys.executable, "-m", "flash_attn_build.upstream", "prepare", "--unpatched"]
    output = _run([*command, "--dest", str(dest)], capture=True)
    record: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return record


def source_of(upstream: Path, tu: str) -> Path:
    """Finds upstream's file of a short name such as "fwd_hdim64_bf16".

    Raises:
        SettingError: Upstream has none of that name.
    """
    folder = upstream / "flash_attn" / "src"
    path = folder / f"flash_{tu}_sm80.cu"
    if not path.is_file():
        names = sorted(
            p.name.removeprefix("flash_").removesuffix("_sm80.cu")
            for p in folder.glob("flash_*_sm80.cu")
        )
        raise SettingError(f"--tus: expected names out of {', '.join(names)}; got {tu!r}")
    return path


def architecture_flags(architectures: Sequence[str]) -> list[str]:
    """Turns CMake's names of architectures ("90-real", "90-virtual") into nvcc's flags."""
    flags = []
    for name in architectures:
        number, _, kind = name.partition("-")
        code = {"real": f"sm_{number}", "virtual": f"compute_{number}"}.get(kind)
        if not number.isdigit() or code is None:
            raise SettingError(f"architecture: expected e.g. '90-real', got {name!r}")
        flags.append(f"--generate-code=arch=compute_{number},code={code}")
    return flags


def include_flags(upstream: Path) -> list[str]:
    """Include paths for upstream's files; torch_free first, in place of torch's headers."""
    folders = (ROOT / "cpp/torch_free", upstream / "flash_attn/src", upstream / "cutlass/include")
    return [f"-I{folder}" for folder in folders]


def read_costs(log: Path) -> list[dict[str, Any]]:
    """Reads what the compiler launcher noted, a record per object file, in order of name."""
    costs = []
    for path in log.glob("*.json"):
        note = json.loads(path.read_text(encoding="utf-8"))
        name = Path(note["output"]).name.removesuffix(".o").removesuffix(".cu")
        name = name.removeprefix("flash_").removesuffix("_sm80")
        if not name.startswith(("fwd_", "bwd_")):
            continue  # CMake's own trials of the compiler
        keys = ("cpu_seconds", "wall_seconds", "peak_rss_bytes")
        costs.append({"name": name, **{key: note[key] for key in keys}})
    return sorted(costs, key=lambda one: str(one["name"]))


def default_jobs() -> int:
    """MAX_JOBS, or what cores and memory allow for upstream's largest files."""
    count = jobs.count()
    memory = jobs.available_memory()
    if os.environ.get("MAX_JOBS", "").strip() or memory is None:
        return count
    return max(1, min(count, memory // PEAK_BYTES_PER_COMPILATION))


def _run(command: Sequence[str], *, cwd: Path | None = None, capture: bool = False) -> str:
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        cwd=cwd,
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
    parser.add_argument("--cost", action="store_true", help="measure upstream's own files instead")
    parser.add_argument("--tus", nargs="+", default=list(COST_TUS), help="which, with --cost")
    parser.add_argument("--result", type=Path, default=COST_RESULT, help="where, with --cost")
    options = parser.parse_args(arguments)
    try:
        if options.cost:
            files.write_json(options.result, cost(options.out, options.tus))
            print(options.result)
        else:
            library = build(options.out, options.jobs or default_jobs(), options.define)
            print(f"{library}: {library.stat().st_size / 1e6:.1f} MB")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
