"""The mode in which torch.utils.checkpoint recomputes a function."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .current import deterministic_mode, get_deterministic_mode

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def checkpoint_contexts() -> Contexts:
    """Makes torch.utils.checkpoint recompute a function in the mode of its first run.

    The backward recomputes a function in its own mode: that of the thread that called backward()
    or, with a torch that does not pass it to its autograd threads, that of the process. If that
    mode differs from the first one, for instance because a `deterministic_mode` block was left,
    rows have other bits. Passed as context_fn, this function prevents that. use_reentrant=True
    takes no context_fn: decorate the function with `deterministic_mode` instead.

    In a checkpoint that torch.compile compiles, the mode is part of the graph; this function then
    returns the contexts of a checkpoint that saves nothing, torch.compile's default.

    Returns:
        The context of the first run, which changes nothing, and that of each recomputation.

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
        # The only kind of context that torch.compile supports.
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        return create_selective_checkpoint_contexts(_recompute)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    mode = get_deterministic_mode()
    return nullcontext(), deterministic_mode(*mode)


def _is_traced() -> bool:
    # The test of torch.utils.checkpoint: in some versions is_compiling() is False at this stage.
    key = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(key) is not None


def _recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.PREFER_RECOMPUTE
