"""What adapters share: imports, calls of flash_attn's functions, and autograd around kernels.

Ours, FlashAttention-2 and FlashAttention-4 have functions as flash_attn has them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from .attention import Packed

_NAMES = {"scale": "softmax_scale", "window": "window_size", "seqlens_k": "cache_seqlens"}


def imported(name: str, advice: str = "") -> Any:
    """Imports a package; raises UnavailableError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} cannot be imported ({error}){advice}") from error


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a call as these functions name them."""
    found = {_NAMES.get(name, name): value for name, value in options.items()}
    packed: Packed | None = found.pop("packed", None)
    return found if packed is None else found | packed.arguments()


def call(module: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    """Calls that function of a module which takes these arguments, and returns out."""
    if "cu_seqlens_q" in given:
        result = module.flash_attn_varlen_func(q, k, v, **given)
    elif "cache_seqlens" in given or "block_table" in given:
        given.pop("deterministic", None)  # of the backward, which it does not have
        latent = v.shape[-1] != k.shape[-1] > 256  # the values are columns of the keys
        result = module.flash_attn_with_kvcache(q, k, None if latent else v, **given)
    else:
        result = module.flash_attn_func(q, k, v, **given)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


class Differentiable(torch.autograd.Function):
    """Attention by its kernels: `forward(q, k, v)` returns out and lse, and
    `backward(dout, q, k, v, out, lse)` the gradients of q, k and v.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Any, backward: Any) -> Tensor:
        out, lse = forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gradients = backward
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *dout: Any) -> tuple[Any, ...]:
        return (*ctx.gradients(*dout, *ctx.saved_tensors), None, None)
