"""Runs the kernels for a few queries on the CPU, and compares the bits of their paths.

    python -m tests.emulator.run --upstream build/dev/upstream --head-dims 64 128 --count 40
    python -m tests.emulator.run --upstream build/dev/upstream --before TREE
    python -m tests.emulator.run --upstream build/dev/upstream --old TREE

The bits to meet are those of few-rows, or of TREE: the repository in an earlier state, all of whose
paths then run too, or (--old) a source tree that has no path but few-rows.

Needs g++ and the CUDA runtime (headers and libcudart_static.a), but no GPU. Drawn calls go through
each path twice: with asynchronous copies at their earliest and at their latest moment. A kernel
that may start before the one before it has ended does so. See emulator.h for what this shows.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ELEMENTS = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}


def copy_sources(tree: Path, upstream: Path, folder: Path, head_dim: int, dtype: str) -> Path:
    """Copies a source tree's kernels, and puts the emulator's headers in the place of some.

    Args:
        tree: the repository, or another state of it.
        upstream: upstream's sources, patched, as a build leaves them.
        folder: where to; made.
        head_dim: of the kernels.
        dtype: "bf16" or "fp16".

    Returns:
        The folder of the kernels.
    """
    sources = folder / "kernels"
    shutil.copytree(tree / "cpp" / "kernels", sources)
    shutil.copytree(HERE / "stubs" / "overlay", sources, dirs_exist_ok=True)
    copies = sources / "sm80" / "decode" / "few_rows_copy.cuh"  # its one line of PTX is a hint
    lines = copies.read_text(encoding="utf-8").splitlines()
    copies.write_text(
        "\n".join(line for line in lines if "prefetch.global" not in line), encoding="utf-8"
    )
    (sources / "instances.h").write_text(
        f"#define FAD_FWD_INSTANCES(X) X({dtype}, {head_dim})\n", encoding="utf-8"
    )
    headers = folder / "upstream"
    headers.mkdir()
    for name in ("flash.h", "block_info.h", "namespace_config.h"):
        shutil.copy(upstream / "flash_attn" / "src" / name, headers)
    return sources


def compile_program(source: str, options: list[str], tree: Path, folder: Path, cuda: Path) -> Path:
    """Compiles a program of this folder with copied kernels.

    Args:
        source: the program's file.
        options: for g++.
        tree: see `copy_sources`.
        folder: see tree.
        cuda: folder with CUDA's include and lib.

    Returns:
        The program.
    """
    sources = folder / "kernels"
    program = folder / source.removesuffix(".cpp")
    include = [HERE, HERE / "stubs", sources, folder / "upstream", tree / "cpp" / "torch_free"]
    command = [
        *("g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-o", str(program)),
        *("-DFLASH_ATTENTION_DETERMINISTIC", *options),
        *(f"-I{path}" for path in include),
        *("-isystem", str(cuda / "include"), str(HERE / source), str(sources / "plan.cpp")),
        *([str(sources / "cost_model.cpp")] if (sources / "cost_model.cpp").exists() else []),
        *(f"-L{cuda / 'lib'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"),
    ]
    subprocess.run(command, check=True)
    return program


def build(
    tree: Path, upstream: Path, cuda: Path, folder: Path, head_dim: int, dtype: str, old: bool
) -> Path:
    """Compiles few_rows.cpp; old: the tree has no path but few-rows. See the functions above."""
    copy_sources(tree, upstream, folder, head_dim, dtype)
    options = [f"-DHEAD_DIM={head_dim}", f"-DELEMENT={ELEMENTS[dtype]}"]
    return compile_program("few_rows.cpp", options + ["-DOLD_TREE"] * old, tree, folder, cuda)


def results(program: Path, first: int, count: int, path: str, late: bool) -> bytes:
    """Runs drawn calls, and returns the bytes of all results."""
    out = program.with_suffix(".bin")
    words = [str(program), str(first), str(count), path, str(int(late)), str(out)]
    subprocess.run(words, check=True)
    return out.read_bytes()


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="an earlier state to compare with")
    parser.add_argument("--old", type=Path, help="a source tree without scores-first, likewise")
    parser.add_argument(
        "--cuda", type=Path, default=Path("/usr/local/cuda/targets/x86_64-linux"), metavar="FOLDER"
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=ELEMENTS, default=list(ELEMENTS))
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args(arguments)
    failed = False
    for head_dim in options.head_dims:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                kernel = (options.upstream, options.cuda)
                new = build(ROOT, *kernel, folder / "new", head_dim, dtype, old=False)
                runs: dict[str, bytes] = {}
                trees = {"": new}
                if options.before:
                    trees = {
                        "before, ": build(
                            options.before, *kernel, folder / "before", head_dim, dtype, old=False
                        ),
                        **trees,
                    }
                for tree, program in trees.items():
                    for path in ("few_rows", "scores_first"):
                        for late in (False, True):
                            run = f"{tree}{path}, copies {'late' if late else 'early'}"
                            runs[run] = results(program, options.first, options.count, path, late)
                if options.old:
                    old = build(options.old, *kernel, folder / "old", head_dim, dtype, old=True)
                    runs["old"] = results(old, options.first, options.count, "few_rows", False)
            expected = runs["old"] if options.old else next(iter(runs.values()))
            different = [name for name, run in runs.items() if run != expected]
            failed = failed or bool(different)
            print(
                f"head dim {head_dim}, {dtype}: {options.count} calls, {len(expected)} bytes, "
                f"{'different: ' + ', '.join(different) if different else 'all equal'}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
