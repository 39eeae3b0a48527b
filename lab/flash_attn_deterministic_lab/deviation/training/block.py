"""The transformer block of both workloads."""

from __future__ import annotations

import torch
from torch import nn

from ..attentions.registry import Attention


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and added to its input.

    With a condition, norms are scaled by it and have no weights of their own.
    """

    def __init__(
        self, width: int, heads: int, attention: Attention, conditioned: bool, causal: bool
    ) -> None:
        super().__init__()
        self.heads, self.attention, self.causal = heads, attention, causal
        self.norm1 = nn.LayerNorm(width, elementwise_affine=not conditioned)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=not conditioned)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.scale = nn.Linear(width, 2 * width) if conditioned else None

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, tokens, width), and a condition (batch, width), to the like of x."""
        gains: tuple[torch.Tensor | float, ...] = (0.0, 0.0)
        if self.scale is not None:
            gains = self.scale(condition)[:, None].chunk(2, -1)
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x) * (1 + gains[0]))
        qkv = qkv.reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, tokens, width))
        result: torch.Tensor = x + self.mlp(self.norm2(x) * (1 + gains[1]))
        return result
