"""FlashAttention-3, from its package or from a library that holds its ops."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from .attention import Function, Packed
from .interface import Differentiable, imported

VARIABLE = "FA3_LIBRARY"  # path of the library


def _load() -> None:
    """Loads torch.ops.flash_attn_3; raises UnavailableError."""
    library = os.environ.get(VARIABLE)
    if not library:
        imported("flash_attn_interface", f"; {VARIABLE} may name a library")
    elif not hasattr(torch.ops.flash_attn_3, "fwd"):
        load_library(VARIABLE, library)


def load_library(variable: str, library: str) -> None:
    """Loads a library of ops that a variable names; raises UnavailableError."""
    for runtime in Path(library).parent.glob("libcudart.so*"):  # what it was built with
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call, unused-ignore]
    except OSError as error:
        raise UnavailableError(f"{variable}: {library} cannot be loaded ({error})") from error


def flash_attn_3(num_splits: int = 0, deterministic: bool = False) -> Function:
    """Loads FlashAttention-3, and returns its attention; 0 splits: its heuristic."""
    _load()

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        packed: Packed | None = None,
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        names = {"seqlens_k": "seqused_k", "block_table": "page_table"}
        given = {names.get(name, name): value for name, value in options.items()}
        given |= {
            "is_causal": causal,
            "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale,
        }
        if packed is not None:
            given |= packed.arguments()
        if packed is not None and "page_table" in given:  # it wants lengths beside pages
            for name in ("max_seqlen_k", "cu_seqlens_k"):
                given.pop(name)
            given["seqused_k"] = packed.seqused_k
        if window is not None:
            given |= {"window_size_left": window[0], "window_size_right": window[1]}

        def forward(*inputs: Tensor) -> Any:
            return torch.ops.flash_attn_3.fwd(*inputs, num_splits=num_splits, **given)[:2]

        def backward(dout: Tensor, *saved: Tensor) -> list[Tensor]:
            gradients = [torch.empty_like(tensor) for tensor in saved[:3]]
            tensors = dout.contiguous(), *saved, *gradients
            torch.ops.flash_attn_3.bwd(*tensors, deterministic=deterministic, **given)
            return gradients

        out: Tensor = Differentiable.apply(q, k, v, forward, backward)  # type: ignore[no-untyped-call, unused-ignore]
        return out

    return attend
