"""A causal language model of bytes, trained on the Python sources that torch ships."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..attentions.registry import Attention
from .block import Block

_CORPUS_BYTES = 32 << 20
_VOCABULARY = 256


@dataclass(frozen=True)
class LanguageSize:
    """How large the model and its batches are; context in bytes."""

    width: int
    depth: int
    heads: int
    context: int
    batch: int
    learning_rate: float = 6e-4
    weight_decay: float = 0.1


LANGUAGE_SIZES = {
    "tiny": LanguageSize(width=32, depth=2, heads=2, context=48, batch=4),
    "small": LanguageSize(width=128, depth=4, heads=4, context=128, batch=8),
    "25m": LanguageSize(width=512, depth=8, heads=8, context=1024, batch=16),
    "100m": LanguageSize(width=768, depth=14, heads=12, context=1024, batch=8),
    # Qiu and Yao's failing run, but for its data (OpenWebText in BPE), 16 micro-batches a step,
    # cosine schedule and gradient clipping.
    "gpt2": LanguageSize(
        width=768, depth=12, heads=12, context=1024, batch=20, learning_rate=1e-3, weight_decay=0.0
    ),
}


@functools.lru_cache(maxsize=1)
def corpus() -> torch.Tensor:
    """Returns the first 32 MiB of torch's Python sources, file by file in order of name, uint8."""
    folder = Path(torch.__file__).parent
    text = bytearray()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    return torch.frombuffer(text[:_CORPUS_BYTES], dtype=torch.uint8)


def _held_out() -> int:
    """Returns how many bytes at the end of the corpus are held out: a sixteenth."""
    return len(corpus()) // 16


class Transformer(nn.Module):
    """GPT-2's layout: (batch, tokens) bytes to logits (batch, tokens, 256)."""

    def __init__(self, size: LanguageSize, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, attention, conditioned=False, causal=True)
            for _ in range(size.depth)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, _VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # GPT-2: what is added to the residual stream starts smaller, by its depth.
                deep = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.depth) ** (0.5 if deep else 0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Language:
    """The workload: the next byte of program text."""

    size: LanguageSize

    def model(self, attention: Attention) -> nn.Module:
        return Transformer(self.size, attention)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(),
            lr=self.size.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.size.weight_decay,
        )

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        """Draws (batch, context + 1) bytes from random places of the corpus, on the CPU."""
        return self._windows(corpus()[: -_held_out()], generator)

    def held_out(self, generator: torch.Generator) -> torch.Tensor:
        """Draws the same from the end of the corpus, which no training sees."""
        return self._windows(corpus()[-_held_out() :], generator)

    def _windows(self, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        rows = torch.arange(self.size.context + 1)
        starts = torch.randint(len(text) - len(rows), (self.size.batch, 1), generator=generator)
        return text[starts + rows].long()

    def outputs(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Returns the logits of all but the last byte, (batch, context, 256)."""
        logits: torch.Tensor = model(batch[:, :-1].to(next(model.parameters()).device))
        return logits.float()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy in nats per byte."""
        logits = self.outputs(model, batch)
        target = batch[:, 1:].to(logits.device)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
