"""Inputs, and attention in float64, for the tests of several modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import all_equal
from flash_attn_deterministic.verify.contract import Attention, size_of
from flash_attn_deterministic.verify.contract.call import Call, Tensors
from flash_attn_deterministic.verify.contract.check import case_of, make
from flash_attn_deterministic.verify.exact import Definition

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(
    batch: int = 1,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    nheads: int = 2,
    nheads_k: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Inputs:
    """Normal q, k and v in (batch, seqlen, nheads, head_dim)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        values = torch.randn(batch, seqlen, heads, head_dim, generator=generator)
        return values.to(dtype)

    return normal(seqlen_q, nheads), normal(seqlen_k, nheads_k), normal(seqlen_k, nheads_k)


def drawn(feature: str, batch: int, seqlen_q: int, seqlen_k: int, head_dim: int = 16) -> Call:
    """A call of the contract, with a feature of `verify`, 4 heads and 2 KV heads."""
    case, shape = case_of(head_dim, "bf16", feature, {}), {"seqlen_q": seqlen_q, "batch": batch}
    size = size_of("cpu", quick=False)
    return make(case, Attention.installed(), size, seqlen_k=seqlen_k, nheads=4, **shape)


def same(left: Tensors, right: Tensors) -> bool:
    """Whether results of the same names have the same bits."""
    return all_equal(left.values(), [right[name] for name in left])


# How the reference cuts its work.
tiles = pytest.mark.parametrize(
    ("elements", "rows"),
    [
        # One row at a time skips every block that is hidden from it; all rows at once go through
        # each block that one of them sees.
        pytest.param(1, 1, id="row-by-row"),
        pytest.param(3000, 7, id="odd-cut"),
        pytest.param(1 << 30, 1 << 30, id="all-at-once"),
    ],
)


def normal_like(tensor: torch.Tensor, seed: int = 17) -> torch.Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def autograd_gradients(
    function: Callable[..., torch.Tensor], inputs: Inputs, dout: torch.Tensor
) -> Inputs:
    """dq, dk and dv of function(q, k, v), which autograd finds."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    dq, dk, dv = torch.autograd.grad(function(*leaves), leaves, dout)
    return dq, dk, dv


def definition(
    q: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> Definition:
    """The oracle of `verify`, of the reference's options; slopes (nheads,) or (batch, nheads)."""
    slopes = None if alibi_slopes is None else alibi_slopes.expand(q.shape[0], -1)
    return Definition(causal, window, softcap, softmax_scale, slopes)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse in float64, by the definition."""
    found = definition(q, *args, **options).forward(q, k, v)
    return found.out, found.softmax_lse


def tolerance(dtype: torch.dtype, v: torch.Tensor) -> float:
    """Bound on |out - float64's out|: out and P are rounded once each to dtype."""
    largest = v.abs().max().item() if v.numel() else 0.0
    return 1.5 * torch.finfo(dtype).eps * largest + 1e-6
