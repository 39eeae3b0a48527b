"""Seeing or replacing every call of scaled_dot_product_attention that a model makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...errors import ArgumentError

_SDPA = functional.scaled_dot_product_attention


@contextlib.contextmanager
def replaced_attention(replacement: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Runs `replacement` in the place of torch's scaled_dot_product_attention inside the block.

    Calls of torch's own function by the replacement are left alone. torch.nn.MultiheadAttention's
    fused path in eval mode, which calls no function that can be seen, is switched off. Autocast
    turns tensors to 16 bits for torch's function; so it does for the replacement.

    Raises:
        ArgumentError: at the end, where there was no call.
    """
    busy, calls = False, 0

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        nonlocal busy, calls
        if busy:
            return _SDPA(query, key, value, *args, **kwargs)
        busy, calls = True, calls + 1
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        try:
            return replacement(query, key, value, *args, **kwargs)
        finally:
            busy = False

    class Functions(TorchFunctionMode):
        """Whatever name the function was imported under."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            run = attend if func is _SDPA and not busy else func
            return run(*args, **(kwargs or {}))

    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # torch's own functions call it as an attribute, and no mode is active inside of them.
    functional.scaled_dot_product_attention = attend
    try:
        with Functions():
            yield
            if not calls:
                raise ArgumentError(
                    "model: expected calls of scaled_dot_product_attention, got none; compiled "
                    "models and attention written out as matmul and softmax can't be replaced"
                )
    finally:
        functional.scaled_dot_product_attention = _SDPA
        torch.backends.mha.set_fastpath_enabled(fast_path)
