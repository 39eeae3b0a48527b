"""Gradients in float64 by the definition, and calls of the backward for its contract tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from attention_cases import Inputs
from contract_cases import FEATURES, RAGGED, Call, cumulative, make_call
from flash_attn_deterministic.reference import attention_backward, varlen_attention_backward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# The backward has no splits.
BACKWARD_FEATURES = [name for name in FEATURES if name != "causal-one-split"]


def autograd_gradients(
    function: Callable[..., torch.Tensor], inputs: Inputs, dout: torch.Tensor
) -> Gradients:
    """dq, dk and dv of function(q, k, v), which autograd finds."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    dq, dk, dv = torch.autograd.grad(function(*leaves), leaves, dout)
    return dq, dk, dv


def normal_like(tensor: torch.Tensor, seed: int = 17) -> torch.Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


@dataclass(frozen=True)
class BackwardCall:
    """One call of reference.attention_backward, and the forward that it belongs to."""

    forward: Call
    dout: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor
    dropout: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, forward: Call, **dropout: Any) -> BackwardCall:
        """Runs the forward; dropout: dropout_p and rng_state."""
        called = replace(forward, options={**forward.options, **dropout})
        return cls(forward, normal_like(forward.q), *called(), dropout)

    def __call__(self) -> Gradients:
        call = self.forward
        return attention_backward(
            self.dout,
            call.q,
            call.k,
            call.v,
            self.out,
            self.softmax_lse,
            alibi_slopes=call.slopes,
            **self.options,
        )

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that do not differ from sequence to sequence."""
        options = {n: x for n, x in self.forward.options.items() if n != "split_size"}
        return {**options, **self.dropout}

    def sequences(self, index: slice | list[int]) -> BackwardCall:
        return replace(
            self,
            forward=self.forward.sequences(index),
            dout=self.dout[index],
            out=self.out[index],
            softmax_lse=self.softmax_lse[index],
        )


def make_backward(feature: str, batch: int, seqlen_q: int, seqlen_k: int) -> BackwardCall:
    """The backward of contract_cases.make_call."""
    return BackwardCall.of(make_call(feature, batch, seqlen_q, seqlen_k))


def ragged_backwards(feature: str) -> list[BackwardCall]:
    """A call of one sequence for each of RAGGED."""
    return [
        make_backward(feature, len(RAGGED), q, k).sequences(slice(i, i + 1))
        for i, (q, k) in enumerate(RAGGED)
    ]


def packed_backward(
    calls: Sequence[BackwardCall], spare: int = 0, **changes: Any
) -> tuple[Gradients, torch.Tensor, torch.Tensor]:
    """The calls of one sequence each as one packed call.

    Args:
        calls: of one sequence each.
        spare: rows at the end of q and k that belong to no sequence.
        **changes: keyword arguments that differ.

    Returns:
        The gradients, cu_seqlens_q and cu_seqlens_k.
    """
    forwards = [call.forward for call in calls]
    starts_q = cumulative([call.q.shape[1] for call in forwards])
    starts_k = cumulative([call.seqlen for call in forwards])

    def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        garbage = tensors[0].new_full((spare, *tensors[0].shape[2:]), float("nan"))
        return torch.cat([*(x[0] for x in tensors), garbage])

    slopes = [call.slopes for call in forwards if call.slopes is not None]
    gradients = varlen_attention_backward(
        packed([call.dout for call in calls]),
        packed([call.q for call in forwards]),
        packed([call.k for call in forwards]),
        packed([call.v for call in forwards]),
        packed([call.out for call in calls]),
        packed([call.softmax_lse.transpose(1, 2) for call in calls]).transpose(0, 1),
        starts_q,
        starts_k,
        alibi_slopes=torch.cat(slopes) if slopes else None,
        **{**calls[0].options, **changes},
    )
    return gradients, starts_q, starts_k
