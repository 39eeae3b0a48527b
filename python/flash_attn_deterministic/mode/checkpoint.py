"""The mode of what torch.utils.checkpoint runs again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .current import deterministic_mode, get_deterministic_mode

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def checkpoint_contexts() -> Contexts:
    """Makes a checkpointed function run again in the mode that it first ran in.

    torch.utils.checkpoint runs a function again in the backward, in the mode that holds then: that
    of the thread that called backward(), where torch can tell its autograd threads of it, otherwise
    that of the process. If that is another than the first time, because a `deterministic_mode`
    block was left for instance, rows have other bits. Passed as context_fn, this function prevents
    that, with any torch. With use_reentrant=True, which takes no context_fn, let the function
    itself enter the mode: `deterministic_mode` decorates it.

    Where torch.compile compiles the checkpoint too, the mode is compiled in, and this function
    gives the contexts of a checkpoint that keeps nothing, as torch.compile has them without it.

    Returns:
        The contexts of the first run, which changes nothing, and of those in the backward.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(1, 4, 3, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> with deterministic_mode(split_size=512):
        ...     out = checkpoint(
        ...         flash_attn_qkvpacked_func,
        ...         x,
        ...         use_reentrant=False,
        ...         context_fn=checkpoint_contexts,
        ...     )
        >>> out.sum().backward()
    """
    if _is_traced():
        # The only kind of context that torch takes there.
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        return create_selective_checkpoint_contexts(_recompute)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    mode = get_deterministic_mode()
    return nullcontext(), deterministic_mode(*mode)


def _is_traced() -> bool:
    # As torch.utils.checkpoint asks; torch.compiler.is_compiling() is False at this stage in some
    # versions.
    key = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(key) is not None


def _recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.PREFER_RECOMPUTE
