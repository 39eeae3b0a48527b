"""Calls of ops that nothing but autograd follows.

They need not go through the kernel that torch.library.register_autograd makes of an op's formula.
That is a function of Python, which torch runs at every call, also where no gradient is wanted; it
takes the host longer than the rest of a call (docs/adr/0021-less-host-time.md).
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
# Not public: with a torch that lacks one of them every call counts as followed.
_AVAILABLE = (
    all(hasattr(_C, name) for name in _NAMES)
    and hasattr(getattr(_C, "_functorch", None), "maybe_current_level")
    and hasattr(forward_ad, "_current_level")
)


def is_followed(*tensors: Any) -> bool:
    """Returns whether anything but autograd follows a call.

    That is torch.compile, a mode of torch (of fake tensors, for instance), a transform of
    torch.func, a forward derivative, or a tensor of a class of its own. Such a call has to go
    through torch.ops, where all of them look.

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
