"""Kernels that only tests have, compiled where they run."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

CPP = Path(__file__).parents[2] / "cpp"


def find_nvcc() -> str | None:
    """Returns $CUDACXX, or an nvcc that is at hand; None: there is none."""
    named = os.environ.get("CUDACXX")
    return named or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def compiled(nvcc: str, source: Path, folder: Path, code: str) -> ctypes.CDLL:
    """Compiles a file for one architecture, such as "90a", and loads it."""
    built = folder / f"{source.stem}.so"
    subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-DNDEBUG", "-shared", "-Xcompiler", "-fPIC,-fno-gnu-unique",
         "-gencode", f"arch=compute_{code},code=sm_{code}", f"-I{CPP}/kernels",
         f"-I{CPP}/torch_free", "-o", built, source],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(built))
