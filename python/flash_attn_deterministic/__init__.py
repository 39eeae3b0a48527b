"""FlashAttention-2 with the same bits every time: deterministic, batch-invariant attention."""

from __future__ import annotations

from typing import Any

from .errors import FlashAttnError
from .interface import flash_attn_func

__all__ = ["FlashAttnError", "__version__", "flash_attn_func"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Looked up on demand: importlib.metadata costs more than the rest of this import.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("flash-attn-deterministic")
        except PackageNotFoundError as error:
            raise AttributeError(
                "__version__: flash-attn-deterministic is not installed; this is a source tree"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
