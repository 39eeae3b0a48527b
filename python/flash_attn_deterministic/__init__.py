"""FlashAttention-2 with the same bits every time: deterministic, batch-invariant attention."""

from __future__ import annotations

import os.path
import sys
from typing import Any

try:
    import torch as _torch  # noqa: F401
except KeyboardInterrupt:
    # It takes seconds. The command, which can't catch this, ends without a traceback.
    if sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) == "flash-attn-deterministic":
        sys.exit(130)
    raise

from .errors import FlashAttnError
from .integrations.alias import as_flash_attn
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .mode.checkpoint import checkpoint_contexts
from .mode.current import (
    Mode,
    deterministic_mode,
    get_deterministic_mode,
    set_deterministic_mode,
)
from .mode.explain import explain
from .mode.plan import Plan

__all__ = [
    "FlashAttnError",
    "Mode",
    "Plan",
    "as_flash_attn",
    "checkpoint_contexts",
    "deterministic_mode",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_deterministic_mode",
    "set_deterministic_mode",
]


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
