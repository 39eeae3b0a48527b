"""FlashAttention-2's own kernels, from the library that `nox -s baseline` builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from . import upstream
from .attention import Function, Packed


def load(path: str, deterministic: bool) -> Function:
    """Opens the library, and returns its attention; raises UnavailableError."""
    try:
        library = upstream.Baseline(Path(path))
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"{Path(path).name} cannot be loaded ({error})") from error

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
            out, lse = library.forward(q, k, v, **given)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.given = given
            return out

        @staticmethod
        def backward(ctx: Any, *dout: Any) -> tuple[Any, ...]:
            gradients = library.backward(
                *dout, *ctx.saved_tensors, deterministic=deterministic, **ctx.given
            )
            return (*gradients, None)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        packed: Packed | None = None,
        dropout_p: float = 0.0,
        **features: Any,
    ) -> Tensor:
        if not features.keys() <= {"softcap", "alibi_slopes"}:
            raise UnavailableError("the library takes no pages, lengths of keys, or scale")
        if dropout_p:
            features |= {"rng_state": torch.tensor([1, 0], device=q.device)}
        scores = upstream.Scores(window=window, dropout_p=dropout_p, **features)
        given: dict[str, Any] = {"causal": causal, "scores": scores}
        if packed is not None:
            given["packed"] = packed
        if not library.holds(
            q.shape[-1], q.dtype, causal, scores, backward=torch.is_grad_enabled()
        ):
            raise UnavailableError("the library holds no such kernel")
        return Attend.apply(q, k, v, given)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    return attend
