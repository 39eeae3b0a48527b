"""Objects in torch's thread-local state, which torch copies to threads of its autograd engine.

backward(), and with it what torch.utils.checkpoint recomputes, runs in threads of the engine, which
do not see Python's thread-local values of the thread that called it.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("_is_key_in_tls", "_get_obj_in_tls", "_stash_obj_in_tls", "_remove_obj_from_tls")
# Not public: with a torch that lacks them nothing is copied.
_AVAILABLE = all(hasattr(torch._C, name) for name in _NAMES)
_C: Any = torch._C


def get(name: str) -> Any:
    """Returns the object under a name in this thread, or None."""
    if _AVAILABLE and _C._is_key_in_tls(name):
        return _C._get_obj_in_tls(name)
    return None


def put(name: str, value: Any) -> None:
    """Puts an object under a name in this thread; None removes it."""
    if not _AVAILABLE:
        return
    if value is not None:
        _C._stash_obj_in_tls(name, value)
    elif _C._is_key_in_tls(name):
        # A thread that ends with an object left could wait for the interpreter's lock forever.
        _C._remove_obj_from_tls(name)
