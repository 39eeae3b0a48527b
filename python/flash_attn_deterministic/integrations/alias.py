"""Replaces flash_attn by this package in a running process, on request."""

from __future__ import annotations

import sys
import threading
from types import FrameType, ModuleType

_NAMES = ("flash_attn", "flash_attn_3", "flash_attn_interface")
_lock = threading.Lock()
_active: list[as_flash_attn] = []
# The modules of another flash_attn; the last undo restores them.
_before: dict[str, ModuleType] = {}


class as_flash_attn:
    """Makes `import flash_attn` give this package, until it is undone.

    The alias holds flash_attn (the public functions), flash_attn.flash_attn_interface (with
    _flash_attn_forward, _flash_attn_backward, their varlen and _wrapped_ forms) and
    flash_attn.bert_padding; see `flash_attn_deterministic.integrations.flash_attn`. It holds
    FlashAttention-3's public functions, too, as flash_attn_interface and as
    flash_attn_3.flash_attn_interface; see `...integrations.flash_attn_3`. Another
    flash_attn, even if it is imported already, is hidden meanwhile. A module that has imported
    names from either keeps them: call this before importing code that uses flash_attn. Importing
    what is not in the alias raises ModuleNotFoundError, which names what is.

    The alias is no distribution: importlib.metadata does not find flash-attn, nor do libraries that
    look there, such as transformers. `flash_attn.__version__` is 2.8.3+deterministic.

    Use it as a function, whose result has `undo`, or in a `with` block. It holds for all threads.
    Several may overlap; the last undo removes the alias.

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
                modules = _modules()  # first, so that a failure hides nothing
                _before.update(_loaded())
                _replace(modules)
                sys.meta_path.append(_Missing)
            _active.append(self)

    def undo(self) -> None:
        """Removes the alias, unless another `as_flash_attn` is active. May be called again."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if not _active:
                sys.meta_path.remove(_Missing)
                _replace(_before)
                _before.clear()

    def __enter__(self) -> as_flash_attn:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class _Missing:
    """Asked last: says in words that a module of flash_attn is not in the alias."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError in an import; of flash_attn itself, importlib says it all."""
        package = name.partition(".")[0]
        # Who asks whether a module is there, as torch asks for flash_attn.cute, gets None.
        if package in _NAMES and _imports(sys._getframe(1)):
            there = ", ".join(one for one in sys.modules if one.partition(".")[0] in _NAMES)
            raise ModuleNotFoundError(
                f"{name} is not in the alias that as_flash_attn() made, which has {there}. What "
                "needs more needs flash-attn itself: import it before as_flash_attn(), or undo() "
                "the alias",
                name=name,
            )


def _imports(frame: FrameType | None) -> bool:
    """Returns whether importlib imports a module, and does not only look for it."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib._boot"):
        if frame.f_code.co_name.startswith("_find_and_load"):
            return True
        frame = frame.f_back
    return False


def _modules() -> dict[str, ModuleType]:
    from . import flash_attn, flash_attn_3

    package = ModuleType("flash_attn_3")
    package.__dict__.update(flash_attn_interface=flash_attn_3, __path__=[])
    return {
        "flash_attn": flash_attn,
        "flash_attn.flash_attn_interface": flash_attn.flash_attn_interface,
        "flash_attn.bert_padding": flash_attn.bert_padding,
        "flash_attn_3": package,
        "flash_attn_3.flash_attn_interface": flash_attn_3,
        "flash_attn_interface": flash_attn_3,
    }


def _loaded() -> dict[str, ModuleType]:
    modules = list(sys.modules.items())
    return {name: module for name, module in modules if name.split(".")[0] in _NAMES}


def _replace(modules: dict[str, ModuleType]) -> None:
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(modules)
