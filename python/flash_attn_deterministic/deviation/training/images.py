"""Images drawn by a formula, with the text that describes them."""

from __future__ import annotations

import torch

COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.3, 0.9),
    "yellow": (0.9, 0.9, 0.1),
}
SHAPES = ("circle", "square", "diamond", "ring")
SIZES = {"small": 0.2, "large": 0.35}
COLUMNS = {"left": 0.35, "right": 0.65}
ROWS = {"top": 0.35, "bottom": 0.65}
BACKGROUNDS = {"dark": 0.1, "light": 0.8}
_FIELDS = (tuple(COLOURS), SHAPES, tuple(SIZES), tuple(COLUMNS), tuple(ROWS), tuple(BACKGROUNDS))
WORDS = tuple(word for words in _FIELDS for word in words)
TEXT_LENGTH = len(_FIELDS)


def draw_batch(
    batch: int, side: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws images and their texts.

    Args:
        batch: how many.
        side: height and width in pixels.
        generator: of the choices.

    Returns:
        images (batch, 3, side, side) in [-1, 1], float32, and texts (batch, TEXT_LENGTH), indices
        into WORDS: one word for colour, shape, size, column, row and background.
    """
    choice = [torch.randint(len(words), (batch,), generator=generator) for words in _FIELDS]
    colour, shape, size, column, row, background = choice
    radius, x0, y0, grey = (
        torch.tensor(list(values.values()))[index][:, None, None]
        for values, index in (
            (SIZES, size), (COLUMNS, column), (ROWS, row), (BACKGROUNDS, background),
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
    ink = torch.tensor(list(COLOURS.values()))[colour][:, :, None, None]
    images = (inside * ink + (1 - inside) * grey[:, None]) * 2 - 1
    offsets = torch.tensor([0, *map(len, _FIELDS[:-1])]).cumsum(0)
    return images, torch.stack(choice, 1) + offsets
