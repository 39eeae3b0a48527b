"""What this package uses of torch that is not public, and what happens with a torch without it.

`_dispatch_tls_set_dispatch_key_excluded`, `_dispatch_tls_is_dispatch_key_excluded`,
`_AutoDispatchBelowAutograd`, `DispatchKey.AutogradFunctionality`, `_any_requires_grad`,
`_len_torch_dispatch_stack`, `_len_torch_function_stack`, `_get_function_stack_at`,
`_functorch.maybe_current_level`, `forward_ad._current_level`, `OpOverload._op`: eager calls go
through torch's dispatcher, and take the host longer.
`torch.utils._device.DeviceContext`: so do calls inside a device context.

`_is_key_in_tls`, `_get_obj_in_tls`, `_stash_obj_in_tls`, `_remove_obj_from_tls`: backward()
recomputes a checkpoint in the mode of the process, unless `checkpoint_contexts` is used.

`utils.checkpoint._StopRecomputationError`, which ends a forward that a checkpoint recomputes, after
its op: ranks take it for an error, and compare their next calls again.

`_after_autograd_keyset`, `_is_any_autocast_enabled` (interface), `_get_dispatch_mode` (mode),
`_dispatch_has_kernel_for_dispatch_key` (ops), `_foreach_add_` (distributed),
`_nn.scaled_dot_product_attention` (distributed: what torch's function was before context_parallel
replaced it), `Library._destroy` (integrations.torch) and transformers' `_lazy_imports` and
`_check_and_adjust_attn_implementation`: what needs them raises an AttributeError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad

C: Any = torch._C
_functorch: Any = getattr(C, "_functorch", None)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_NAMES = (
    *("_dispatch_tls_set_dispatch_key_excluded", "_dispatch_tls_is_dispatch_key_excluded"),
    *("_AutoDispatchBelowAutograd", "_any_requires_grad", "_get_function_stack_at"),
    *("_len_torch_dispatch_stack", "_len_torch_function_stack"),
)
# All backends' keys of autograd.
AUTOGRAD = getattr(C.DispatchKey, "AutogradFunctionality", None)
_CAN_SKIP = (
    AUTOGRAD is not None
    and all(hasattr(C, name) for name in _NAMES)
    and hasattr(_functorch, "maybe_current_level")
    and hasattr(forward_ad, "_current_level")
)
STOPS: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
HAS_STATE = all(
    hasattr(C, name)
    for name in ("_is_key_in_tls", "_get_obj_in_tls", "_stash_obj_in_tls", "_remove_obj_from_tls")
)


def is_observed(tensors: Iterable[Any]) -> bool:
    """Returns whether more than autograd has to see a call of an op on these tensors.

    That is so in a mode (such as that of fake tensors), a transform of torch.func or forward-mode
    AD, and with tensors of a subclass. A device context only changes where tensors are made.
    """
    return (
        not _CAN_SKIP
        or C._len_torch_dispatch_stack() > 0
        or (C._len_torch_function_stack() > 0 and not _only_device_contexts())
        or _functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _only_device_contexts() -> bool:
    module = getattr(torch.utils, "_device", None)
    context = getattr(module, "DeviceContext", None)
    modes = map(C._get_function_stack_at, range(C._len_torch_function_stack()))
    return all(type(mode) is context for mode in modes)


# torch copies its thread-local state to threads of its autograd engine. backward(), and with it
# what torch.utils.checkpoint recomputes, runs in these, which do not see Python's thread-local
# values of the thread that called it.


def get_state(name: str) -> Any:
    """Returns the object under a name in torch's state of this thread, or None."""
    if HAS_STATE and C._is_key_in_tls(name):
        return C._get_obj_in_tls(name)
    return None


def put_state(name: str, value: Any) -> None:
    """Puts an object under a name in torch's state of this thread; None removes it."""
    if not HAS_STATE:
        return
    if value is not None:
        C._stash_obj_in_tls(name, value)
    elif C._is_key_in_tls(name):
        # A thread that ends with an object left could wait for the interpreter's lock forever.
        C._remove_obj_from_tls(name)
