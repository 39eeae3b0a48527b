"""Runs the Hopper kernels on the CPU, and compares bits: forward's with the few-rows kernel's.

    python -m tests.emulator.hopper --upstream build/dev/upstream --head-dims 32 256 --count 20
    python -m tests.emulator.hopper --upstream build/dev/upstream --tree TREE
    python -m tests.emulator.hopper --upstream build/dev/upstream --faults
    python -m tests.emulator.hopper --upstream build/dev/upstream --plans --count 10000

Drawn calls go through every kernel of instances.json. --faults plants known faults, one after
another, each of which must be found. --plans runs no kernel, but checks the plans of drawn calls
and devices (plans.cpp). --backward runs the backward's loop against plain loops (hopper_bwd.cpp).
Needs g++ and the CUDA runtime (headers and libcudart_static.a), but no GPU. See hopper.h for what
this shows.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.emulator.faults import FAULTS, Fault
from tests.emulator.run import ROOT, compile_program, copy_sources

# A function with PTX in it; and one that asks the driver.
_FUNCTION = re.compile(
    r"(?:^template <[^\n]*>\n)?^(?:__device__ __forceinline__|inline) [^;{}]*\{\n"
    r"(?:[^}\n].*\n|\n)*^\}\n",
    re.MULTILINE,
)


def _without_ptx(source: str) -> str:
    def kept(match: re.Match[str]) -> str:
        text = match[0]
        return "" if re.search(r"\basm\b", text) or "encode_tensor_map() {" in text else text

    source = _FUNCTION.sub(kept, source)
    return re.sub(r"^FAD_PRODUCTS\(.*\n", "", source, flags=re.MULTILINE)


def head_dims(tree: Path, kernels: str) -> list[int]:
    """Returns the head dims of the Hopper kernels in instances.json.

    Args:
        tree: the repository.
        kernels: "fwd_kernels" or "bwd_kernels".
    """
    table = json.loads((tree / "cpp/instances.json").read_text(encoding="utf-8"))
    rows = [row for row in table[kernels] if row["family"] == "sm90"]
    return sorted({head_dim for row in rows for head_dim in row["head_dims"]})


def _table(tree: Path, head_dim: int, dtype: str) -> str:
    """The rows of instances.json for one head dim, as X(path, block_m, covers); of
    the sm90 family X(path, head_dim_v, block_m, covers)."""
    table = json.loads((tree / "cpp/instances.json").read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {"sm80": [], "sm90": []}
    for row in table["fwd_kernels"]:
        if head_dim not in row.get("head_dims", [head_dim]):
            continue
        tiles = table["fwd_tiles"].get(row.get("tiles", row["path"]), {}).get(str(head_dim), {})
        covers = " | ".join("k" + word.title().replace("_", "") for word in row["covers"])
        path = "k" + row["path"].title().replace("_", "")
        block_m = row.get("block_m", tiles.get("block_m"))
        own = f"{row.get('head_dim_v', head_dim)}, " if row["family"] == "sm90" else ""
        rows[row["family"]].append(f"X({path}, {own}{block_m}, {covers or 0})")
    return "\n".join(
        [
            f"#define HALF {int(dtype == 'fp16')}",
            *(f"#define {name.upper()}_ROWS(X) {' '.join(uses)}" for name, uses in rows.items()),
            "",
        ]
    )


def build(
    tree: Path,
    upstream: Path,
    cuda: Path,
    folder: Path,
    head_dim: int,
    dtype: str,
    source: str = "hopper_fwd.cpp",
    fault: Fault | None = None,
) -> Path:
    """Compiles a source tree's kernels for the CPU.

    Args:
        tree: the repository, or another state of it.
        upstream: upstream's sources, patched, as a build leaves them.
        cuda: folder with CUDA's include and lib.
        folder: where to build.
        head_dim: of the kernels.
        dtype: "bf16" or "fp16".
        source: of the program.
        fault: to plant; None for none.

    Returns:
        The program.
    """
    sources = copy_sources(tree, upstream, folder, head_dim, dtype)
    if source == "hopper_fwd.cpp":  # little scratch memory, so that calls take several launches
        plan = sources / "plan.h"
        text = plan.read_text(encoding="utf-8").replace("{64} << 20", "{2} << 20")
        plan.write_text(text, encoding="utf-8")
    if source == "hopper_bwd.cpp":  # short chunks, so that calls have several
        tree_of = sources / "tree" / "tree.h"
        text = tree_of.read_text(encoding="utf-8").replace("kChunkRows = 4096", "kChunkRows = 128")
        tree_of.write_text(text, encoding="utf-8")
    if fault:
        path = sources / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.text) != 1:
            raise ValueError(f"{fault.file}: {text.count(fault.text)} places have {fault.text!r}")
        path.write_text(text.replace(fault.text, fault.instead), encoding="utf-8")
    headers = (path for path in (sources / "sm90").rglob("*") if path.is_file())
    for path in [*headers, sources / "sm80/row_block.h", sources / "turns.h"]:
        text = path.read_text(encoding="utf-8")
        without = _without_ptx(text)
        if without != text:
            text = without.replace("#pragma once\n", '#pragma once\n#include "hopper.h"\n', 1)
        if path.name == "wgmma.h":
            text += '#include "hopper_products.h"\n'
        path.write_text(text, encoding="utf-8")
    (sources / "hopper_table.h").write_text(_table(tree, head_dim, dtype), encoding="utf-8")
    words = ["-march=native", "-fno-strict-aliasing", "-Wno-psabi"]
    words += [f"-DHEAD_DIM={head_dim}", f"-DFAD_HEAD_DIM={head_dim}"]
    return compile_program(source, words, tree, folder, cuda)


def find(fault: Fault, tree: Path, upstream: Path, cuda: Path, first: int, count: int) -> str:
    """Plants a fault and runs drawn calls.

    Args:
        fault: to plant.
        tree: see `build`, as upstream and cuda.
        upstream: see tree.
        cuda: see tree.
        first: seed of the first call.
        count: of calls at most.

    Returns:
        How the fault was found; "" if it was not.
    """
    with tempfile.TemporaryDirectory() as name:
        where = (tree, upstream, cuda, Path(name) / "new")
        program = build(*where, fault.head_dim, "bf16", fault=fault)
        command = [str(program), str(first), str(count), "1"]
        try:
            run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return "does not end"
    return f"{run.returncode}: {run.stderr.partition(chr(10))[0]}" if run.returncode else ""


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 where bits differ, a plan is wrong, or a planted fault is
    not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another state of the repository")
    parser.add_argument(
        "--cuda", type=Path, default=Path("/usr/local/cuda/targets/x86_64-linux"), metavar="FOLDER"
    )
    parser.add_argument("--head-dims", type=int, nargs="+", help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16"], default=["bf16"])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, help="calls; default: 10, for a fault at most 40")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--faults", action="store_true")
    which.add_argument("--plans", action="store_true")
    which.add_argument("--backward", action="store_true")
    options = parser.parse_args(arguments)
    kernels = head_dims(options.tree, "bwd_kernels" if options.backward else "fwd_kernels")
    chosen = options.head_dims or kernels
    if not set(chosen) <= set(kernels):
        parser.error(f"--head-dims: expected some of {kernels}, got {chosen}")
    name = "plans" if options.plans else "hopper_bwd" if options.backward else "hopper_fwd"
    source = f"{name}.cpp"
    count = options.count if options.count is not None else 40 if options.faults else 10
    failed = False
    for fault in FAULTS if options.faults else []:
        where = (options.tree, options.upstream, options.cuda)
        how = find(fault, *where, options.first, count)
        failed = failed or not how
        print(f"{fault.what}: {how or 'NOT FOUND'}", flush=True)
    if options.faults:
        return 1 if failed else 0
    for head_dim in chosen:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as name:
                program = build(
                    *(options.tree, options.upstream, options.cuda, Path(name) / "new"),
                    *(head_dim, dtype, source),
                )
                run = subprocess.run([str(program), str(options.first), str(count)], check=False)
                failed = failed or run.returncode != 0
                print(f"head dim {head_dim}, {dtype}: status {run.returncode}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
