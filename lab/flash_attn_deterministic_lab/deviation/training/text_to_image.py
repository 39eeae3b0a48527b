"""A small text-to-image transformer, trained by flow matching on drawings made by a formula."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..attentions.registry import Attention
from .block import Block

_COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.3, 0.9),
    "yellow": (0.9, 0.9, 0.1),
}
_SHAPES = ("circle", "square", "diamond", "ring")
_RADII = {"small": 0.2, "large": 0.35}
_COLUMNS = {"left": 0.35, "right": 0.65}
_ROWS = {"top": 0.35, "bottom": 0.65}
_BACKGROUNDS = {"dark": 0.1, "light": 0.8}
_FIELDS = tuple(map(tuple, (_COLOURS, _SHAPES, _RADII, _COLUMNS, _ROWS, _BACKGROUNDS)))
WORDS = tuple(word for words in _FIELDS for word in words)
TEXT_LENGTH = len(_FIELDS)


def draw_batch(
    batch: int, side: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws images and their texts.

    Returns:
        images (batch, 3, side, side) in [-1, 1], float32, and texts (batch, TEXT_LENGTH), indices
        into WORDS: one word for colour, shape, size, column, row and background.
    """
    choice = [torch.randint(len(words), (batch,), generator=generator) for words in _FIELDS]
    colour, shape, size, column, row, background = choice
    radius, x0, y0, grey = (
        torch.tensor(list(values.values()))[index][:, None, None]
        for values, index in (
            (_RADII, size), (_COLUMNS, column), (_ROWS, row), (_BACKGROUNDS, background),
        )
    )  # fmt: skip
    # A little off, so that no two images are the same.
    x0 = x0 + 0.04 * torch.randn((batch, 1, 1), generator=generator)
    y0 = y0 + 0.04 * torch.randn((batch, 1, 1), generator=generator)
    line = (torch.arange(side) + 0.5) / side
    x, y = (line[None, None, :] - x0).abs(), (line[None, :, None] - y0).abs()
    disc = (x.square() + y.square()).sqrt()
    distances = torch.stack(
        [disc - radius, torch.maximum(x, y) - radius, x + y - radius,
         (disc - radius).abs() - 0.3 * radius], 1,
    )  # fmt: skip
    distance = distances[torch.arange(batch), shape]
    # One pixel of blur at the edge.
    inside = (0.5 - distance * side).clamp(0, 1)[:, None]
    ink = torch.tensor(list(_COLOURS.values()))[colour][:, :, None, None]
    images = (inside * ink + (1 - inside) * grey[:, None]) * 2 - 1
    offsets = torch.tensor([0, *map(len, _FIELDS[:-1])]).cumsum(0)
    return images, torch.stack(choice, 1) + offsets


@dataclass(frozen=True)
class Size:
    """How large the model and its batches are; side and patch in pixels."""

    side: int
    patch: int
    width: int
    depth: int
    heads: int
    batch: int


SIZES = {
    "tiny": Size(side=16, patch=4, width=32, depth=2, heads=2, batch=8),
    "small": Size(side=24, patch=3, width=64, depth=4, heads=4, batch=16),
}


class TextToImage(nn.Module):
    """Predicts the velocity from noise to image: (images, texts, times) -> like images."""

    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.size = size
        pixels = 3 * size.patch**2
        self.patch_in = nn.Linear(pixels, size.width)
        tokens = (size.side // size.patch) ** 2 + TEXT_LENGTH
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, size.width))
        self.words = nn.Embedding(len(WORDS), size.width)
        self.time = nn.Sequential(
            nn.Linear(size.width, size.width), nn.SiLU(), nn.Linear(size.width, size.width)
        )
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, attention, conditioned=True, causal=False)
            for _ in range(size.depth)
        )
        self.norm = nn.LayerNorm(size.width)
        self.patch_out = nn.Linear(size.width, pixels)

    def forward(
        self, images: torch.Tensor, texts: torch.Tensor, times: torch.Tensor
    ) -> torch.Tensor:
        patch = self.size.patch
        patches = nn.functional.unfold(images, patch, stride=patch).transpose(1, 2)
        x = torch.cat([self.patch_in(patches), self.words(texts)], 1) + self.position
        half = self.size.width // 2
        rates = torch.exp(-math.log(1000.0) * torch.arange(half, device=x.device) / half)
        angles = 1000.0 * times[:, None] * rates
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(self.position.dtype)
        condition = self.time(waves) + self.words(texts).mean(1)
        for block in self.blocks:
            x = block(x, condition)
        x = self.patch_out(self.norm(x[:, : patches.shape[1]])).float().transpose(1, 2)
        return nn.functional.fold(x, images.shape[-2:], patch, stride=patch)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Drawings:
    """The workload: drawings with text conditions."""

    size: Size

    def model(self, attention: Attention) -> nn.Module:
        return TextToImage(self.size, attention)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def batch(self, generator: torch.Generator) -> Batch:
        """Draws images, texts, noise and times on the CPU."""
        images, texts = draw_batch(self.size.batch, self.size.side, generator)
        noise = torch.randn(images.shape, generator=generator)
        return images, texts, noise, torch.rand((len(images),), generator=generator)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the predicted velocities, like images."""
        parameter = next(model.parameters())
        images, texts, noise, times = (tensor.to(parameter.device) for tensor in batch)
        mix = times[:, None, None, None]
        noisy = (1 - mix) * noise + mix * images
        predicted: torch.Tensor = model(noisy.to(parameter.dtype), texts, times)
        return predicted.float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the flow-matching loss."""
        predicted = self.outputs(model, batch)
        target = (batch[0] - batch[2]).to(predicted.device)
        return (predicted - target).square().mean()
