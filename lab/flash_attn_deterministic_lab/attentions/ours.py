"""flash-attn-deterministic, by its public functions alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..errors import UnavailableError
from ..shared.commands import variable
from .attention import Function, Packed


def make(
    *, reference: bool = False, residual: bool = False, **fixed: Any
) -> Callable[[], Function]:
    """Returns what imports it.

    Args:
        reference: whether the CPU computes, whatever the tensors' device.
        residual: whether the rounding error of out is kept for the backward.
        **fixed: arguments of every call.
    """

    def made() -> Function:
        try:
            package = importlib.import_module("flash_attn_deterministic")
        except ImportError as error:
            raise UnavailableError(
                f"flash-attn-deterministic is not installed ({error})"
            ) from error

        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            device, given = q.device, _arguments(options) | fixed
            if reference:
                q, k, v = q.cpu(), k.cpu(), v.cpu()
                given = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in given.items()}
            if not residual:
                return _call(package, q, k, v, given).to(device)
            with package.deterministic_mode(True, keep_residual=True):
                return _call(package, q, k, v, given).to(device)

        return attend

    return made


_RENAMED = {"scale": "softmax_scale", "window": "window_size", "seqlens_k": "cache_seqlens"}


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    found = {_RENAMED.get(name, name): value for name, value in options.items()}
    packed: Packed | None = found.pop("packed", None)
    return found if packed is None else found | packed.arguments()


def _call(package: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    if "cu_seqlens_q" in given:
        out: Tensor = package.flash_attn_varlen_func(q, k, v, **given)
    elif "cache_seqlens" in given or "block_table" in given:
        given.pop("deterministic", None)  # of the backward, which it does not have
        out = package.flash_attn_with_kvcache(q, k, v, **given)
    else:
        out = package.flash_attn_func(q, k, v, **given)
    return out


def path(name: str) -> AbstractContextManager[None]:
    """Makes calls inside the block take a path where it can run, such as "few_rows"."""
    return variable("FLASH_ATTENTION_TEST_DEVICE", f"path={name}")


def family(name: str) -> AbstractContextManager[None]:
    """Makes calls inside the block run the kernels of one family, such as "sm80"."""
    return variable("FLASH_ATTENTION_FAMILY", name)  # its kernels read it in each call
