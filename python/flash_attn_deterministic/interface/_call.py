"""What all functions do with their arguments before they call an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch

from .._checks import numbers
from .._checks.determinism import resolve_deterministic
from .._checks.split import check_split_size
from .._ops.arguments import Options
from ..mode.current import resolve

# Defines the ops.
from .._ops import library as library  # isort: skip

WithProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WithLse = tuple[torch.Tensor, torch.Tensor]
Arguments = ParamSpec("Arguments")


class Attention(Protocol[Arguments]):
    """The type of a function that returns more than out where a flag says so.

    Its own signature has Literal[False] for that flag: what it returns then is known.
    """

    __name__: str

    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> torch.Tensor: ...

    @overload
    def __call__(
        self, *args: Any, return_attn_probs: Literal[True], **kwargs: Any
    ) -> WithProbs: ...

    @overload
    def __call__(self, *args: Any, return_softmax_lse: Literal[True], **kwargs: Any) -> WithLse: ...


def typed(function: Callable[Arguments, Any]) -> Attention[Arguments]:
    """Returns the function as it is; the type is for type checkers."""
    return cast(Attention[Arguments], function)


def resolve_options(
    head_dim: int,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    split_size: Any,
    deterministic: Any = None,
) -> Options:
    """Checks the numbers and flags of a call, and fills in what the caller left open.

    Raises:
        ArgumentError: a wrong value.
        ArgumentTypeError: a wrong type.
        MissingInstanceError: deterministic is True, and the wheel holds no such kernels.
    """
    dropout_p = numbers.check_dropout(dropout_p)
    scores = numbers.check_scores(head_dim, softmax_scale, causal, window_size, softcap)
    mode = resolve(check_split_size(split_size, head_dim))
    return Options(
        dropout_p,
        scores,
        mode.split_size,
        mode.enabled,
        resolve_deterministic(deterministic, mode),
    )


def draw_rng_state(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """Draws seed and offset of a call's dropout mask from torch's generator of the device.

    They stay on the device: a replayed CUDA graph draws new ones, and nothing waits for them.

    Returns:
        (2,), int64; None without dropout.
    """
    if dropout_p == 0:
        return None
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pads head_dim to a multiple of 8 with zeros."""
    padding = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor


def slopes_for_op(alibi_slopes: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ALiBi slopes as the ops take them; nothing of the call is differentiable in them."""
    return None if alibi_slopes is None else alibi_slopes.detach().contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a small tensor of lengths or indices unless it is contiguous."""
    return None if tensor is None else tensor.contiguous()
