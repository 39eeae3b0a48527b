"""What torch hands on to the threads of its autograd engine.

backward() runs in threads of the engine's own, which have no thread-local values of Python; what
torch.utils.checkpoint runs again runs there too. torch hands its own state on to them, and with it
objects that were put there by name.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("_is_key_in_tls", "_get_obj_in_tls", "_stash_obj_in_tls", "_remove_obj_from_tls")
# Not public: a torch that lacks them hands nothing on.
_AVAILABLE = all(hasattr(torch._C, name) for name in _NAMES)
_C: Any = torch._C


def handed_on(name: str) -> Any:
    """Returns the object of a name in this thread, or None."""
    if _AVAILABLE and _C._is_key_in_tls(name):
        return _C._get_obj_in_tls(name)
    return None


def hand_on(name: str, value: Any) -> None:
    """Puts an object under a name in this thread; None takes it away."""
    if not _AVAILABLE:
        return
    if value is not None:
        _C._stash_obj_in_tls(name, value)
    elif _C._is_key_in_tls(name):
        # A thread that ended with an object left could wait for the interpreter's lock forever.
        _C._remove_obj_from_tls(name)
