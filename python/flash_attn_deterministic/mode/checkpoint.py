"""The mode of what torch.utils.checkpoint runs again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from .current import deterministic_mode, get_deterministic_mode

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def checkpoint_contexts() -> Contexts:
    """Makes a checkpointed function run again in the mode that it first ran in.

    torch.utils.checkpoint runs a function again in the backward, in the mode that holds then: that
    of the thread that called backward(), where torch can tell its autograd threads of it, otherwise
    that of the process. If that is another than the first time, because a `deterministic_mode`
    block was left for instance, rows have other bits. Passed as context_fn, this function prevents
    that, with any torch. With
    use_reentrant=True, which takes no context_fn, let the function itself enter the mode:
    `deterministic_mode` decorates it. Functions that torch.compile has compiled with their
    checkpoints need neither: the mode is compiled in.

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
    mode = get_deterministic_mode()
    return nullcontext(), deterministic_mode(mode.enabled, mode.split_size)
