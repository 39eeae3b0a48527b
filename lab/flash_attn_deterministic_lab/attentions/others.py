"""FlashAttention-2 and -4, of packages that this machine has."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import UnavailableError
from . import baseline
from .attention import Function
from .interface import arguments, call

BASELINE = "FA2_BASELINE"  # path of the library that `nox -s baseline` builds


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} cannot be imported ({error})") from error


def flash_attn_2(deterministic: bool = False) -> Callable[[], Function]:
    """Returns what makes FlashAttention-2, or its kernels alone where BASELINE names them."""

    def made() -> Function:
        library = os.environ.get(BASELINE)
        if library:
            return baseline.load(library, deterministic)
        module = _installed("flash_attn")
        if not hasattr(module, "flash_attn_func"):
            # FlashAttention-4 installs a package flash_attn without files of its own, in which only
            # flash_attn.cute lies.
            where = ", ".join(getattr(module, "__path__", ()))
            raise UnavailableError(
                f"flash_attn is a namespace package of another project here ({where}): it hides "
                "FlashAttention-2, or that is not installed; take its folder off the path"
            )

        return _called(module, deterministic)

    return made


def flash_attn_4(deterministic: bool = False) -> Callable[[], Function]:
    """Returns what makes FlashAttention-4, which compiles a kernel at its first call."""

    def made() -> Function:
        return _called(_installed("flash_attn.cute"), deterministic)

    return made


def _called(module: Any, deterministic: bool) -> Function:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return call(module, q, k, v, arguments(options) | {"deterministic": deterministic})

    return attend
