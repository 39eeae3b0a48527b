"""FlashAttention-3, from its package or from a library that holds its ops."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VARIABLE = "FA3_LIBRARY"  # path of the library


def load() -> str:
    """Loads torch.ops.flash_attn_3, and returns what it came from.

    Raises:
        ImportError: neither the package nor the library is there.
    """
    library = os.environ.get(VARIABLE)
    if not library:
        try:
            importlib.import_module("flash_attn_interface")
        except ImportError as error:
            raise ImportError(
                f"flash_attn_interface cannot be imported ({error}); {VARIABLE} may name a library"
            ) from error
        return "flash-attn-3"
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        for runtime in Path(library).parent.glob("libcudart.so*"):  # what it was built with
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call, unused-ignore]
        except OSError as error:
            raise ImportError(f"{VARIABLE}: {library} cannot be loaded ({error})") from error
    return f"FA3 of {Path(library).name}"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        num_splits: int,
        deterministic: bool,
        settings: dict[str, Any],
    ) -> Tensor:
        result = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=num_splits, **settings)
        out: Tensor = result[0]
        ctx.save_for_backward(q, k, v, out, result[1])
        ctx.deterministic, ctx.settings = deterministic, settings
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Any) -> tuple[Any, ...]:
        gradients = [torch.empty_like(t) for t in ctx.saved_tensors[:3]]
        torch.ops.flash_attn_3.bwd(
            dout[0].contiguous(),
            *ctx.saved_tensors,
            *gradients,
            deterministic=ctx.deterministic,
            **ctx.settings,
        )
        return (*gradients, None, None, None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    num_splits: int = 0,
    deterministic: bool = False,
    **options: Any,
) -> Tensor:
    """Calls FlashAttention-3; `load` must have been called before.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), or packed (total_q, nheads, head_dim).
        k: (batch, seqlen_k, nheads_k, head_dim), packed likewise, or pages.
        v: like k.
        causal: whether the mask is causal, aligned to the bottom right corner.
        num_splits: 0: its heuristic; 1: none.
        deterministic: of the backward.
        **options: what both of its ops take besides, such as cu_seqlens_q or window_size_left;
            without a backward also what the forward alone takes, such as page_table.

    Returns:
        out like q; it has a gradient where q, k and v have.
    """
    settings = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, **options}
    out: Tensor = _Attention.apply(q, k, v, num_splits, deterministic, settings)  # type: ignore[no-untyped-call, unused-ignore]
    return out
