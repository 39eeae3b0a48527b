"""The ops on CUDA tensors: `_C.so`, which registers them through torch's stable ABI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import MissingInstanceError
from ..schemas import BACKWARD, FORWARD, NAMESPACE, SUMS


def load(path: Path) -> str:
    """Loads the library with the CUDA implementations; returns "", or the reason why not.

    Importing the package never fails for it: CPU tensors and the command `info` still work.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not path.exists():
        return f"the wheel holds no kernels ({path} does not exist)"
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call, unused-ignore]
    except (OSError, RuntimeError) as error:
        return (
            f"{path} does not load into torch {torch.__version__}, it needs torch >= 2.10 ({error})"
        )
    return ""


def register_missing(library: Any, reason: str) -> None:
    """Registers an error for each op that has no CUDA implementation.

    `reason` says why no library was loaded; "": the loaded library lacks the op.
    """
    for name in (*FORWARD, *BACKWARD, *SUMS):
        if not has_kernel(name):
            library.impl(name, _missing(name, reason), "CUDA")


def has_kernel(name: str) -> bool:
    """Returns whether an op has an implementation for CUDA tensors."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CUDA")


def _missing(name: str, reason: str) -> Callable[..., NoReturn]:
    def raise_missing(*arguments: Any) -> NoReturn:
        why = reason or f"the wheel's library does not implement {name}"
        raise MissingInstanceError(
            f"no CUDA kernels: {why}; install the release wheel beside a CUDA build of torch, "
            "or move the tensors to the CPU"
        )

    return raise_missing
