"""FlashAttention-2 with the same bits every time: deterministic, batch-invariant attention."""

# ruff: noqa: E402 -- the handler of Ctrl-C is set before the slow imports

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any


def _leave(*_: Any) -> None:
    os._exit(130)


# sys.argv may be empty or missing where a program embeds Python.
_program = str(next(iter(getattr(sys, "argv", ())), ""))
if os.path.basename(_program) == "flash-attn-deterministic" or (
    _program == "-m" and __name__ in sys.orig_argv
):
    # The process runs our command. Importing torch takes seconds, in which Ctrl-C would abort the
    # process in C++ code or print a traceback. main() restores Python's handler.
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)

from .errors import FlashAttnError
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

if TYPE_CHECKING:
    from .integrations.alias import as_flash_attn
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


# Imported at first use, to keep the import of the package short.
_LAZY = {"Plan": "mode.plan", "as_flash_attn": "integrations.alias", "explain": "mode.explain"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(f".{_LAZY[name]}", __name__)
        globals()[name] = getattr(module, name)
        return globals()[name]
    if name == "__version__":
        # On demand: importlib.metadata takes longer to import than the rest of the package.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("flash-attn-deterministic")
        except PackageNotFoundError as error:
            raise AttributeError(
                "__version__: flash-attn-deterministic is not installed; this is a source tree"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
