"""Puts this package in the place of flash_attn, in a running process and on request."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

_NAME = "flash_attn"
_lock = threading.Lock()
_active: list[as_flash_attn] = []
# What `import flash_attn` and its submodules gave before; restored after the last undo.
_before: dict[str, ModuleType] = {}


class as_flash_attn:
    """Makes `import flash_attn` give this package, until it is undone.

    The alias holds flash_attn (the public functions), flash_attn.flash_attn_interface (with
    _flash_attn_forward, _flash_attn_backward, their varlen and _wrapped_ forms) and
    flash_attn.bert_padding; see `flash_attn_deterministic.integrations.flash_attn`. Another
    flash_attn, installed or even imported already, is hidden meanwhile; nothing of it is mixed in.
    A module that has imported names from either keeps them: call this before importing what uses
    flash_attn.

    The alias is no distribution: importlib.metadata does not find flash-attn, and libraries that
    ask there (transformers among them) see none. `flash_attn.__version__` is 2.8.3+deterministic.

    Use it as a function, whose result has `undo`, or in a `with` block. It holds for all threads.
    Several may overlap; the last undo takes the alias away.

    Source:
        The modules of flash_attn 2.8.3.

    Example:
        >>> with as_flash_attn():
        ...     from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'flash_attn_deterministic.interface.dense'
    """

    def __init__(self) -> None:
        with _lock:
            if not _active:
                _install()
            _active.append(self)

    def undo(self) -> None:
        """Takes the alias away, unless another `as_flash_attn` still holds it; once is enough."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if not _active:
                _uninstall()

    def __enter__(self) -> as_flash_attn:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def _modules() -> dict[str, ModuleType]:
    from . import flash_attn

    return {
        _NAME: flash_attn,
        f"{_NAME}.flash_attn_interface": flash_attn.flash_attn_interface,
        f"{_NAME}.bert_padding": flash_attn.bert_padding,
    }


def _loaded() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in sys.modules.items()
        if name == _NAME or name.startswith(f"{_NAME}.")
    }


def _install() -> None:
    modules = _modules()  # first: nothing is hidden if this fails
    _before.update(_loaded())
    _replace(modules)


def _uninstall() -> None:
    _replace(_before)
    _before.clear()


def _replace(modules: dict[str, ModuleType]) -> None:
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(modules)
