"""Which calls of an op have to go through torch's dispatcher.

The others skip the autograd kernel that torch.library.register_autograd makes of an op's formula.
It is a Python function that torch runs in every call, even without gradients, and takes the host
longer than the rest of the call (docs/adr/0021-less-host-time.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

_C: Any = torch._C
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_NAMES = (
    "_AutoDispatchBelowAutograd",
    "_any_requires_grad",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
)
# Not public: with a torch that lacks one of them every call goes through the dispatcher.
_AVAILABLE = (
    all(hasattr(_C, name) for name in _NAMES)
    and hasattr(getattr(_C, "_functorch", None), "maybe_current_level")
    and hasattr(forward_ad, "_current_level")
)


def needs_dispatcher(*tensors: Any) -> bool:
    """Returns whether torch has to see a call of an op for more than its gradient.

    That is so under torch.compile, a mode (such as that of fake tensors), a transform of torch.func
    or forward-mode AD, and with tensors of a subclass.

    Args:
        tensors: of the call, or None.
    """
    return (
        torch.compiler.is_compiling()
        or not _AVAILABLE
        or _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or not _PLAIN.issuperset(map(type, tensors))
    )
