"""FlashAttention-2 with the same bits every time: deterministic, batch-invariant attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .build_info import installed_version as _installed_version
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BuildInfoError,
    DtypeError,
    FlashAttnError,
    MissingInstanceError,
    ModeError,
    NotDeterministicError,
    RankError,
    UnsupportedDeviceError,
    UnsupportedError,
)
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .mode import (
    Mode,
    checkpoint_contexts,
    deterministic_mode,
    get_deterministic_mode,
    set_deterministic_mode,
)

if TYPE_CHECKING:
    from .integrations.alias import as_flash_attn
    from .plan import Plan, explain

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BuildInfoError",
    "DtypeError",
    "FlashAttnError",
    "MissingInstanceError",
    "Mode",
    "ModeError",
    "NotDeterministicError",
    "Plan",
    "RankError",
    "UnsupportedDeviceError",
    "UnsupportedError",
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


# Imported at first use, to keep the import of the package short.
_LAZY = {"Plan": "plan", "as_flash_attn": "integrations.alias", "explain": "plan"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(f".{_LAZY[name]}", __name__)
        globals()[name] = getattr(module, name)
        return globals()[name]
    if name == "__version__":
        if found := _installed_version():
            return found
        raise AttributeError(
            "__version__: flash-attn-deterministic is not installed; this is a source tree"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
