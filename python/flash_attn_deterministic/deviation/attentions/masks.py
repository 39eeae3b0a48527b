"""The mask, scale and grouping of a call of attention, as one bias and equal head counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Call:
    """One call of attention, in the meaning of torch's scaled_dot_product_attention.

    Args:
        q: (batch, nheads, seqlen_q, head_dim).
        k: (batch, nheads_k, seqlen_k, head_dim); nheads_k divides nheads.
        v: like k.
        mask: bool (True: visible) or added to the scores, broadcast to (batch, nheads, seqlen_q,
            seqlen_k).
        causal: hides keys after a query's own index, both counted from the start.
        scale: factor of q k^T; None: head_dim**-0.5.
        window: keys to the left and right of a query that it sees, -1: all; positions are aligned
            at the end of the sequences, as in this package's functions.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    causal: bool = False
    scale: float | None = None
    window: tuple[int, int] = (-1, -1)

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k and v with k's and v's heads repeated for their group."""
        group = self.q.shape[-3] // self.k.shape[-3]
        if group == 1:
            return self.q, self.k, self.v
        k, v = (tensor.repeat_interleave(group, -3) for tensor in (self.k, self.v))
        return self.q, k, v

    def bias(self) -> torch.Tensor | None:
        """Returns what is added to the scores; None: nothing."""
        device = self.q.device
        rows = torch.arange(self.q.shape[-2], device=device)[:, None]
        keys = torch.arange(self.k.shape[-2], device=device)
        hidden: torch.Tensor | None = None
        if self.causal:
            hidden = keys > rows
        left, right = self.window
        if left >= 0 or right >= 0:
            place = rows + self.k.shape[-2] - self.q.shape[-2]
            outside = torch.zeros_like(keys > rows)
            if left >= 0:
                outside |= keys < place - left
            if right >= 0:
                outside |= keys > place + right
            hidden = outside if hidden is None else hidden | outside
        bias = None
        if self.mask is not None:
            bias = self.mask
            if bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape, device=device).masked_fill(~bias, -math.inf)
        if hidden is None:
            return bias
        causal = torch.zeros(hidden.shape, device=device).masked_fill(hidden, -math.inf)
        return causal if bias is None else bias + causal


def call_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, float]:
    """Returns what scaled_dot_product_attention is called with, and the dropout."""
    return Call(query, key, value, attn_mask, is_causal, scale), dropout_p
