"""The mask, scale and grouping of a call of attention, as one bias and equal head counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...errors import ArgumentError

_HIDDEN = -1e4  # what is added to a score and leaves nothing of it in a softmax


@dataclass(frozen=True)
class Call:
    """One call of attention, in the meaning of torch's scaled_dot_product_attention."""

    q: torch.Tensor  # (batch, nheads, seqlen_q, head_dim)
    k: torch.Tensor  # (batch, nheads_k, seqlen_k, head_dim); nheads_k divides nheads
    v: torch.Tensor  # like k
    # Bool (True: visible) or added to the scores; broadcast to (batch, nheads, seqlen_q, seqlen_k).
    mask: torch.Tensor | None = None
    causal: bool = False  # hides keys after a query's own index, both counted from the start
    scale: float | None = None  # factor of q k^T; None: head_dim**-0.5

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def to(self, dtype: torch.dtype) -> Call:
        """Returns the call with its tensors in another dtype."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def plain(self) -> Call:
        """Returns the same call with k and v repeated for their groups, and one bias as its mask.

        Tensors may be (..., seqlen, head_dim) with any leading dimensions then.
        """
        k, v = self.k, self.v
        if k.shape[:-2] != self.q.shape[:-2]:
            group = self.q.shape[-3] // k.shape[-3]
            k, v = (tensor.repeat_interleave(group, -3) for tensor in (k, v))
        return Call(self.q, k, v, self.bias(), scale=self.factor)

    def bias(self) -> torch.Tensor | None:
        """Returns what is added to the scores; None: nothing."""
        place = torch.arange(self.q.shape[-2], device=self.q.device)[:, None]
        keys = torch.arange(self.k.shape[-2], device=self.q.device)
        hidden = [keys > place] if self.causal else []
        if self.mask is not None and self.mask.dtype == torch.bool:
            hidden.append(~self.mask)
        bias = None if self.mask is None or self.mask.dtype == torch.bool else self.mask
        for each in hidden:
            part = torch.zeros(each.shape, device=each.device).masked_fill(each, -math.inf)
            bias = part if bias is None else bias + part
        return bias

    def bias_of(self, keys: slice) -> torch.Tensor:
        """Returns what the bias of a plain call adds to the scores of some keys, in their dtype."""
        assert self.mask is not None
        return (self.mask if self.mask.shape[-1] == 1 else self.mask[..., keys]).to(self.q)

    def by_rows(self, size: int) -> Iterator[Call]:
        """Yields the call of so many queries at a time; it has no causal mask, see `plain`."""
        for start in range(0, self.q.shape[-2], size):
            rows, mask = slice(start, start + size), self.mask
            if mask is not None and mask.shape[-2] > 1:
                mask = mask[..., rows, :]
            yield replace(self, q=self.q[..., rows, :], mask=mask)

    def steps(self) -> Iterator[Call]:
        """Yields the call of each query over the keys up to it, as decoding with a cache has it.

        Raises:
            ArgumentError: a query sees a later key, or queries and keys are not the same tokens.
        """
        seqlen, bias = self.q.shape[-2], self.bias()
        tokens = (seqlen, seqlen)
        later = torch.ones(tokens, dtype=torch.bool, device=self.q.device).triu(1)
        # Some models hide by a large number.
        if (
            self.k.shape[-2] != seqlen
            or bias is None
            or not (bias.expand(*bias.shape[:-2], *tokens)[..., later] <= _HIDDEN).all()
        ):
            raise ArgumentError(
                "attention: expected a call in which each token sees none after it, got another: "
                "nothing is decoded there"
            )
        for row in range(seqlen):
            mask = self.mask
            if mask is not None:
                mask = mask.expand(*mask.shape[:-2], *tokens)[..., row : row + 1, : row + 1]
            k, v = (tensor[..., : row + 1, :] for tensor in (self.k, self.v))
            yield Call(self.q[..., row : row + 1, :], k, v, mask, scale=self.scale)
