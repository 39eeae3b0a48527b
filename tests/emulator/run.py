"""Runs kernels on the CPU, and compares bits.

    python -m tests.emulator.run --upstream build/dev/upstream --head-dims 32 256 --count 20
    python -m tests.emulator.run few --upstream build/dev/upstream
    python -m tests.emulator.run faults --upstream build/dev/upstream
    python -m tests.emulator.run plans --upstream build/dev/upstream --count 10000

Drawn calls go through every kernel of a kind, whose bits are to be those of the kernel for few
rows (forward.cpp) or, of the backward, of plain loops (backward.cpp):

    forward   the Hopper forward, each row of instances.json
    few       both paths for a few queries, with asynchronous copies early and late
    backward  the loop of the Hopper backward
    plans     none: the plans of drawn calls and devices are checked (plans.cpp)
    faults    forward, with one known fault after another, each of which must be found

Needs g++ and the CUDA runtime (headers and libcudart_static.a), but no GPU. A kernel that may start
before the one before it has ended does so. See emulator.h and hopper.h for what this shows.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.emulator.faults import FAULTS, Fault

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The program of a kind, and what calls need to be small: a file, its text, what comes instead.
_LITTLE_SCRATCH = ("plan.h", "{64} << 20", "{2} << 20")  # so that calls take several launches
_SHORT_CHUNKS = ("tree/tree.h", "kChunkRows = 4096", "kChunkRows = 128")  # several of them
KINDS = {
    "forward": ("forward.cpp", _LITTLE_SCRATCH),
    "few": ("forward.cpp", None),
    "backward": ("backward.cpp", _SHORT_CHUNKS),
    "plans": ("plans.cpp", None),
}
# A function with PTX in it; and one that asks the driver.
_FUNCTION = re.compile(
    r"(?:^template <[^\n]*>\n)?^(?:__device__ __forceinline__|inline) [^;{}]*\{\n"
    r"(?:[^}\n].*\n|\n)*^\}\n",
    re.MULTILINE,
)


def head_dims(tree: Path, kind: str) -> list[int]:
    """Returns the head dims of a kind's kernels in instances.json of a repository."""
    table = json.loads((tree / "cpp/instances.json").read_text(encoding="utf-8"))
    rows = table["bwd_kernels" if kind == "backward" else "fwd_kernels"]
    # Of a path for few rows none is emulated.
    found = [
        row["head_dims"]
        for row in rows
        if row["family"] == "sm90" and row.get("path") != "few_rows"
    ]
    return sorted({head_dim for own in found for head_dim in own})


def _without_ptx(source: str) -> str:
    def kept(match: re.Match[str]) -> str:
        text = match[0]
        return "" if re.search(r"\basm\b", text) or "encode_tensor_map() {" in text else text

    source = _FUNCTION.sub(kept, source)
    return re.sub(r"^FAD_PRODUCTS\(.*\n", "", source, flags=re.MULTILINE)


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
        if block_m is None:  # the path has no tiles for this head dim
            continue
        own = f"{row.get('head_dim_v', head_dim)}, " if row["family"] == "sm90" else ""
        rows[row["family"]].append(f"X({path}, {own}{block_m}, {covers or 0})")
    return "\n".join(
        [
            f"#define HALF {int(dtype == 'fp16')}",
            *(f"#define {name.upper()}_ROWS(X) {' '.join(uses)}" for name, uses in rows.items()),
            "",
        ]
    )


def _replace(path: Path, text: str, instead: str) -> None:
    source = path.read_text(encoding="utf-8")
    if source.count(text) != 1:
        raise ValueError(f"{path.name}: {source.count(text)} places have {text!r}")
    path.write_text(source.replace(text, instead), encoding="utf-8")


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
    (sources / "table.h").write_text(_table(tree, head_dim, dtype), encoding="utf-8")
    headers = folder / "upstream"
    headers.mkdir()
    for name in ("flash.h", "block_info.h", "namespace_config.h"):
        shutil.copy(upstream / "flash_attn" / "src" / name, headers)
    return sources


def build(
    tree: Path,
    upstream: Path,
    cuda: Path,
    folder: Path,
    head_dim: int,
    dtype: str,
    kind: str = "forward",
    fault: Fault | None = None,
) -> Path:
    """Compiles a source tree's kernels for the CPU.

    Args:
        tree: see `copy_sources`.
        upstream: see tree.
        cuda: folder with CUDA's include and lib.
        folder: where to build.
        head_dim: see tree.
        dtype: see tree.
        kind: of KINDS.
        fault: to plant; None for none.

    Returns:
        The program.
    """
    sources = copy_sources(tree, upstream, folder, head_dim, dtype)
    source, smaller = KINDS[kind]
    if smaller:
        _replace(sources / smaller[0], *smaller[1:])
    if fault:
        _replace(sources / fault.file, fault.text, fault.instead)
    headers = (path for path in (sources / "sm90").rglob("*") if path.is_file())
    for path in [*headers, sources / "sm80/row_block.h", sources / "turns.h"]:
        text = path.read_text(encoding="utf-8")
        without = _without_ptx(text)
        if without != text:
            text = without.replace("#pragma once\n", '#pragma once\n#include "hopper.h"\n', 1)
        if path.name == "wgmma.h":
            text += '#include "hopper_products.h"\n'
        path.write_text(text, encoding="utf-8")
    program = folder / kind
    include = [HERE, HERE / "stubs", sources, folder / "upstream", tree / "cpp" / "torch_free"]
    defines = ["FLASH_ATTENTION_DETERMINISTIC", f"FEW={kind == 'few':d}"]
    defines += [f"HEAD_DIM={head_dim}", f"FAD_HEAD_DIM={head_dim}"]
    command = [
        # A fault is found by one of the first calls: compiling takes longer than they.
        *("g++", "-std=c++20", "-Og" if fault else "-O1", "-march=native", "-ffp-contract=off"),
        *("-fno-strict-aliasing", "-w", "-Wno-psabi", "-o", str(program)),
        *(f"-D{name}" for name in defines),
        *(f"-I{path}" for path in include),
        *("-isystem", str(cuda / "include"), str(HERE / source)),
        *(str(sources / name) for name in ("plan.cpp", "cost_model.cpp")),
        *(f"-L{cuda / 'lib'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"),
    ]
    subprocess.run(command, check=True)
    return program


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
    parser.add_argument("kind", nargs="?", default="forward", choices=[*KINDS, "faults"])
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another state of the repository")
    parser.add_argument(
        "--cuda", type=Path, default=Path("/usr/local/cuda/targets/x86_64-linux"), metavar="FOLDER"
    )
    parser.add_argument("--head-dims", type=int, nargs="+", help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16"], default=["bf16"])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, help="calls; default: 10, for a fault at most 40")
    options = parser.parse_args(arguments)
    where = (options.tree, options.upstream, options.cuda)
    failed = False
    if options.kind == "faults":
        for fault in FAULTS:
            how = find(fault, *where, options.first, options.count or 40)
            failed = failed or not how
            print(f"{fault.what}: {how or 'NOT FOUND'}", flush=True)
        return int(failed)
    kernels = head_dims(options.tree, options.kind)
    chosen = options.head_dims or kernels
    if not set(chosen) <= set(kernels):
        parser.error(f"--head-dims: expected some of {kernels}, got {chosen}")
    count = 10 if options.count is None else options.count
    for head_dim in chosen:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as name:
                program = build(*where, Path(name) / "new", head_dim, dtype, options.kind)
                run = subprocess.run([str(program), str(options.first), str(count)], check=False)
                failed = failed or run.returncode != 0
                print(f"head dim {head_dim}, {dtype}: status {run.returncode}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
