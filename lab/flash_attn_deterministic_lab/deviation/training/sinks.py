"""The published failure's mechanism, small: queries are trained on rows with equal maxima.

Qiu and Yao (arXiv 2510.04212) trace the loss explosion of a GPT-2 to this chain. Several keys of
a row are alike (keys of low rank), so several scores are the row's maximum and their P is 1. Values
of these keys have one sign in some column. In O = P V, in 16 bits, sums of such values round away
from zero more often than towards it. D = rowsum(dO * O) takes over the error, dS = P (dP - D) has
it at every key, and the gradient of W_q gets the sum of D's errors times (P K)^T x: the same
direction at every step, which adds up.

What the published run comes to by itself is put in by hand here: K has rank 1, its largest entries
are equal, V and dO have one sign. W_q alone is trained. With exact attention its gradient is almost
0, because equal keys have dS of sum 0. Whether a training comes to such a state is not answered.
"""

from __future__ import annotations

import torch
from torch import nn

from ..attentions.registry import Attention

_TIES = 2  # keys that share a row's maximum
_TOKENS, _HEAD_DIM, _BATCH = 64, 64, 8
_LOGIT = 6.0  # scores of the keys at the maximum; the others have its negative


class _OneHead(nn.Module):
    """Attention of one head in which W_q alone is trained."""

    direction: torch.Tensor

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        # Key: the first entry of a token, in one direction, whose square is the head's width.
        direction = torch.randn(_HEAD_DIM).sign()
        self.register_buffer("direction", direction)
        self.query = nn.Linear(_HEAD_DIM, _HEAD_DIM, bias=False)
        with torch.no_grad():
            self.query.weight.mul_(0.02)
            # Every token has 1 in its second entry: all queries look for the same key.
            self.query.weight[:, 1] = direction * _LOGIT * _HEAD_DIM**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, head_dim) to the same."""
        q = self.query(x)
        k = (x[..., :1] * self.direction).to(q.dtype)
        v = (-x.abs() - 0.5).to(q.dtype)
        q, k, v = (tensor[:, None] for tensor in (q, k, v))
        return self.attention(q, k, v)[:, 0]


Batch = tuple[torch.Tensor, torch.Tensor]


class Sinks:
    """The workload: tokens of which a few have the largest key."""

    def model(self, attention: Attention) -> nn.Module:
        return _OneHead(attention)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD: an error that adds up shows as a distance that grows with the steps."""
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(self, generator: torch.Generator) -> Batch:
        """Draws tokens (batch, tokens, head_dim), and what the outputs are weighed with."""
        x = torch.randn((_BATCH, _TOKENS, _HEAD_DIM), generator=generator)
        order = torch.rand((_BATCH, _TOKENS), generator=generator).argsort(-1)
        x[..., 0] = torch.where(order < _TIES, 1.0, -1.0)
        x[..., 1] = 1.0
        return x, torch.randn(x.shape, generator=generator).abs()

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the outputs of attention."""
        parameter = next(model.parameters())
        out: torch.Tensor = model(batch[0].to(parameter.device))
        return out.float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the mean of outputs with weights of one sign, so that dO has one sign."""
        out = self.outputs(model, batch)
        return (out * batch[1].to(out.device)).mean(-1).sum()
