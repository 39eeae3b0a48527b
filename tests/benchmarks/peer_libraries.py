"""Where FlashAttention-3 and -4 come from: folders that the command line names, or installed ones.

--fa3 names a folder with fa3.so, a library of the ops torch.ops.flash_attn_3, and the CUDA runtime
that it was linked to: in the package xformers 0.0.34 it is xformers/flash_attn_3/_C.so, and the
runtime is libcudart.so.12 of nvidia-cuda-runtime-cu12. --fa4 names a folder with flash-attn-4[cu13]
and what it needs (pip install --target). It compiles a kernel when it is first called, for seconds
each; kernels compiled before lie in that folder's `cache`. To fill it for the cases of peers.py, on
any machine with the same Python and without a GPU:

    python -m tests.benchmarks.peer_libraries --fa4 FOLDER [--only WORDS]
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic.bench.problem import Shape
from flash_attn_deterministic.verify.scoreboard import fa3

from tests.benchmarks.shared.peer_cases import BACKWARD, FORWARD
from tests.benchmarks.shared.run import fail


def add_arguments(parser: argparse.ArgumentParser, *, with_fa4: bool = True) -> None:
    """Adds --fa3 and --fa4."""
    parser.add_argument("--fa3", type=Path, metavar="FOLDER", help="of FlashAttention-3's fa3.so")
    if with_fa4:
        parser.add_argument("--fa4", type=Path, metavar="FOLDER", help="of FlashAttention-4")


def find(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Puts the folders of the command line where the peers are looked for.

    Raises:
        SystemExit: there is no fa3.so, or no package; the parser reports it.
    """

    def existing(folder: Path, part: str) -> Path:
        path = folder.resolve() / part
        if not path.exists():
            parser.error(f"expected {path}, found no such file")
        return path

    if getattr(options, "fa3", None) is not None:
        os.environ[fa3.VARIABLE] = str(existing(options.fa3, "fa3.so"))
    if getattr(options, "fa4", None) is not None:
        folder = existing(options.fa4, "flash_attn/cute").parents[1]
        sys.path[:0] = [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
        # The package reads them when it is imported.
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "cache"))


def versions() -> dict[str, str | None]:
    """Returns what the peers say of themselves; None: not there."""
    found: dict[str, str | None] = {"cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call, unused-ignore]
    try:
        found["fa3"] = fa3.load()
    except ImportError:
        found["fa3"] = None
    try:
        importlib.import_module("flash_attn.cute")
        found["fa4"] = f"flash-attn-4 {metadata.version('flash-attn-4')}"
    except metadata.PackageNotFoundError:
        found["fa4"] = "flash-attn-4, no version"
    except ImportError as error:  # one of the packages that it needs, perhaps
        fail(error)
        found["fa4"] = None
    return found


def _compile(shape: Shape) -> None:
    """Makes FlashAttention-4 compile what a shape needs; its own switch for machines without a GPU.

    Autograd would look for the GPU of the tensors, so that the backward is called by hand.
    """
    interface = importlib.import_module("flash_attn.cute.interface")

    class Saved:
        needs_input_grad = (True,) * 32

        def save_for_backward(self, *tensors: Any) -> None:
            self.saved_tensors = tensors

        def set_materialize_grads(self, value: bool) -> None:
            pass

    backward = shape.kind != "forward"
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows_q = (sum(shape.lengths),) if shape.lengths else (shape.batch, shape.queries)
    rows_k = (sum(shape.lengths),) if shape.lengths else (shape.batch, shape.seqlen)
    q = torch.empty(*rows_q, shape.nheads, shape.head_dim, **options).requires_grad_(backward)
    k, v = (
        torch.empty(*rows_k, shape.nheads_k, shape.head_dim, **options).requires_grad_(backward)
        for _ in range(2)
    )
    saved: Any = Saved()
    scores = {
        "causal": shape.causal,
        "window_size": (shape.window, 0) if shape.window >= 0 else (None, None),
        "deterministic": backward,
    }
    with torch.set_grad_enabled(False):
        if shape.lengths:
            starts = torch.empty(shape.batch + 1, device="cuda", dtype=torch.int32)
            function = interface.FlashAttnVarlenFunc
            packed = {
                **{"cu_seqlens_q": starts, "cu_seqlens_k": starts},
                **{"max_seqlen_q": shape.seqlen, "max_seqlen_k": shape.seqlen},
            }
            out, _ = function.forward(saved, q, k, v, **packed, **scores)
        else:
            function = interface.FlashAttnFunc
            out, _ = function.forward(saved, q, k, v, **scores)
        if backward:
            function.backward(saved, torch.empty_like(out), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles FlashAttention-4's kernels; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--fa4", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", help="part of the names of the shapes to compile for")
    options = parser.parse_args(arguments)
    os.environ |= {
        **{"FLASH_ATTENTION_ARCH": "sm_90a", "CUTE_DSL_ARCH": "sm_90a"},
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
    find(options, parser)
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    status = 0
    with FakeTensorMode():
        for case in (*FORWARD, *BACKWARD):
            if options.only not in case.name:
                continue
            begin = time.monotonic()
            try:
                _compile(case.shape)
                words = "compiled or known"
            except Exception as error:
                traceback.print_exc()
                words, status = f"{type(error).__name__}: {error}"[:300], 1
            print(f"{time.monotonic() - begin:6.1f} s {case.name}: {words}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
