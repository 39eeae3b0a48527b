"""Inputs, and attention in float64, for the tests of several modules."""

from __future__ import annotations

import torch

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


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse in float64, by the definition; slopes (nheads,) or (batch, nheads)."""
    head_dim = q.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    keys = k.double().repeat_interleave(group, dim=2)
    values = v.double().repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    # Positive: the key comes after the query.
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    distance = distance - (k.shape[1] - q.shape[1])
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().expand(q.shape[0], -1)
        scores = scores - slopes[:, :, None, None] * distance.abs()
    left, right = window
    if causal:
        right = 0
    if right >= 0:
        scores = scores.masked_fill(distance > right, -float("inf"))
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -float("inf"))
    softmax_lse = torch.logsumexp(scores, dim=-1)
    empty = softmax_lse == -float("inf")
    probs = torch.exp(scores - softmax_lse[..., None]).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("bhij,bjhd->bihd", probs, values)
    return out, softmax_lse.masked_fill(empty, float("inf"))


def tolerance(dtype: torch.dtype, v: torch.Tensor) -> float:
    """Bound on |out - float64's out|: out and P are rounded once each to dtype."""
    largest = v.abs().max().item() if v.numel() else 0.0
    return 1.5 * torch.finfo(dtype).eps * largest + 1e-6
