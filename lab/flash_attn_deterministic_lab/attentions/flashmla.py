"""FlashMLA, decode of latent attention, from a library that holds its ops."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from .attention import Function
from .fa3 import load_library

VARIABLE = "FLASHMLA_LIBRARY"  # path of the library


def flash_mla() -> Function:
    """Loads the library, and returns its decode from pages of 64; raises UnavailableError."""
    library = os.environ.get(VARIABLE)
    if not library:
        raise UnavailableError(f"FlashMLA cannot be loaded: {VARIABLE} has to name its library")
    load_library(VARIABLE, library)

    @functools.lru_cache(maxsize=4)
    def schedule(seqlens_k: Tensor, queries: torch.Size) -> list[Tensor | None]:
        """Made by the first call with these lengths, as models do for all layers."""
        return [None, None]

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
        seqlens_k: Tensor | None = None, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if seqlens_k is None or block_table is None or v.data_ptr() != k.data_ptr():
            raise UnavailableError("FlashMLA takes pages of keys alone, and their lengths")
        made = schedule(seqlens_k, q.shape)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        given = q, k, v.shape[-1], seqlens_k, block_table, scale, causal, *made, None
        result: Any = torch.ops._flashmla_C.dense_decode_fwd(*given)
        out: Tensor = result[0]
        made[:] = result[2:]
        return out

    return attend
