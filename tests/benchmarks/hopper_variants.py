"""Times variants of the Hopper forward, in turns in one process, and compares their bits.

    python -m tests.benchmarks.hopper_variants --compile variants   # anywhere with an nvcc, once
    python -m tests.benchmarks.hopper_variants --libraries variants --out hopper_variants.json

The variants are those of hopper_variants.cu, at the mode's split size and with one split, beside
the installed wheel; peers.py times that beside others. A variant with other bits than the wheel's
sm80 kernels is a failure.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, get_deterministic_mode
from flash_attn_deterministic.bench.problem import Problem, Shape
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.benchmarks.shared.cases import timed
from tests.benchmarks.shared.run import begin_record, run_cases, timing_parser
from tests.gpu.attention import same_bits

SOURCE = Path(__file__).with_suffix(".cu")
CPP = Path(__file__).parents[2] / "cpp"
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
# As CMakeLists.txt has them: bits depend on the last line.
FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "-DFLASH_ATTENTION_DETERMINISTIC", "-shared"),
    *("-Xcompiler", "-fPIC,-fno-gnu-unique", "--expt-relaxed-constexpr"),
    *("-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v"),
    *("--ftz=true", "--prec-div=false", "--prec-sqrt=false", "--fmad=false"),
)


def shapes() -> tuple[Shape, ...]:
    """Returns those that differ in what a variant could gain or lose."""
    found = [
        Shape("forward", batch, seqlen, 16, 16, head_dim, causal)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
        for batch, seqlen in ((4, 4096), (1, 16_384))
    ]
    return (
        *found,
        Shape("forward", 8, 4096, 32, 32, 128),
        Shape("forward", 8, 4096, 32, 32, 128, True),
        Shape("forward", 8, 4096, 32, 8, 128, True),
        Shape("forward", 4, 1024, 16, 16, 128),
        Shape("forward", 4, 4096, 16, 16, 128, True, window=1024),
        Shape("forward", 1, 32_768, 32, 8, 128, True, seqlen_q=512),
        *(
            Shape("forward", batch, seqlen, 16, 16, 32, causal)
            for batch, seqlen in ((256, 128), (128, 256), (64, 512), (32, 1024))
            for causal in (False, True)
        ),
        Shape("forward", 4, 4096, 32, 32, 32),
        Shape("forward", 64, 577, 16, 16, 32),
        Shape("forward", 32, 512, 16, 16, 64, True),
        Shape("forward", 64, 577, 16, 16, 64),
        Shape("forward", 16, 1024, 16, 16, 64),
        Shape("forward", 16, 512, 16, 16, 128, True),
        # Splits, and warps without all of their rows.
        *(Shape("forward", 2, 5001, 8, 8, head_dim, True) for head_dim in HEAD_DIMS),
    )


def compile_variants(folder: Path, head_dims: list[int]) -> None:
    """Compiles hopper_variants.cu for each head dim, side by side.

    Raises:
        SystemExit: nvcc failed, or says that it serialises products (C75xx).
    """
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    running = []
    for head_dim in head_dims:
        command = [nvcc, *FLAGS, f"-I{CPP / 'kernels'}", f"-I{CPP / 'torch_free'}"]
        library = folder / f"d{head_dim}.so"
        command += [f"-DFAD_HEAD_DIM={head_dim}", "-o", str(library), str(SOURCE)]
        log = (folder / f"d{head_dim}.log").open("wb")
        running.append((head_dim, subprocess.Popen(command, stdout=log, stderr=log)))
    for head_dim, process in running:
        status = process.wait()
        words = (folder / f"d{head_dim}.log").read_text(encoding="utf-8", errors="replace")
        if status != 0 or "(C75" in words:
            sys.exit(f"head dim {head_dim}: nvcc failed or serialises products:\n{words[-2000:]}")
        print(f"head dim {head_dim}: compiled", flush=True)


class Library:
    """The variants of one head dim."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.fad_name.restype = ctypes.c_char_p
        variants = range(self._library.fad_variants())
        self.names = [self._library.fad_name(variant).decode() for variant in variants]
        self._sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._counter = torch.empty(1, dtype=torch.int32, device="cuda")

    def run(
        self, variant: int, shape: Shape, qkv: tuple[torch.Tensor, ...], split_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out and softmax_lse.

        Raises:
            RuntimeError: the variant does not take the call.
        """
        q, k, v = qkv
        out = torch.empty_like(q)
        size = (shape.batch, shape.nheads, shape.queries)
        softmax_lse = torch.empty(size, dtype=torch.float32, device="cuda")
        numbers = (
            *(shape.batch, shape.queries, shape.seqlen, shape.nheads, shape.nheads_k),
            *(shape.window, 0 if shape.causal else -1, split_size, self._sms),
        )
        status = self._library.fad_run(
            ctypes.c_int(variant),
            *(ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out, softmax_lse, self._counter)),
            *map(ctypes.c_int, numbers),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if status != 0:
            raise RuntimeError(f"{self.names[variant]} does not take {shape.name}")
        return out, softmax_lse


def _first(call: Callable[[], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return call()[0]


def measure(shape: Shape, library: Library, repeats: int, budget_ms: float) -> dict[str, Any]:
    """Times one case.

    Returns:
        Milliseconds and TFLOP/s by side; which variants have other bits.
    """
    problem = Problem.draw(shape, "cuda")
    qkv = (problem.q, problem.k, problem.v)
    default = get_deterministic_mode().split_size
    options: dict[str, Any] = {"causal": shape.causal, "window_size": (shape.window, -1)}

    def wheel() -> torch.Tensor:
        out: torch.Tensor = flash_attn_func(*qkv, **options)
        return out

    sides: dict[str, Callable[[], torch.Tensor]] = {"wheel": wheel}
    different = []
    for split_size in (default, 0):
        with device_override("family=sm80"):
            out, softmax_lse, _ = flash_attn_func(
                *qkv, **options, split_size=split_size, return_attn_probs=True
            )
        for variant, name in enumerate(library.names):
            found = library.run(variant, shape, qkv, split_size)
            title = f"{name}/{split_size}"
            if not (same_bits(found[0], out) and same_bits(found[1], softmax_lse)):
                different.append(title)
            run = functools.partial(library.run, variant, shape, qkv, split_size)
            sides[title] = functools.partial(_first, run)
    times = timed(sides, budget_ms, repeats)
    return {
        "name": shape.name,
        **asdict(shape),
        "ms": times,
        "tflops": {
            side: round(shape.flops / own["median"] / 1e9, 1) for side, own in times.items()
        },
        "other_bits_than_sm80": different,
    }


def main() -> int:
    """Command line; the exit status is 1 if a case failed, or a variant has other bits."""
    out = Path("hopper_variants.json")
    parser = timing_parser(__doc__, repeats=20, budget_ms=600, out=out)
    parser.add_argument("--compile", type=Path, help="folder to compile the variants into; no more")
    parser.add_argument("--libraries", type=Path, help="folder that --compile wrote")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    options = parser.parse_args()
    if options.compile is not None:
        compile_variants(options.compile, list(options.head_dims))
        return 0
    if options.libraries is None:
        parser.error("expected --compile or --libraries")

    @functools.cache
    def library(head_dim: int) -> Library:
        return Library(options.libraries / f"d{head_dim}.so")

    record = begin_record(options)
    status = run_cases(
        options,
        record,
        [shape for shape in shapes() if shape.head_dim in options.head_dims],
        built=lambda shape: True,
        measure=lambda shape: measure(
            shape, library(shape.head_dim), options.repeats, options.budget_ms
        ),
    )
    other = {case["name"]: case["other_bits_than_sm80"] for case in record["cases"]}
    other = {name: variants for name, variants in other.items() if variants}
    print(f"other bits than the sm80 family's: {other or 'none'}")
    return 1 if other else status


if __name__ == "__main__":
    sys.exit(main())
