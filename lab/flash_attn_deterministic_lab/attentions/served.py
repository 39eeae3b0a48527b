"""An attention as servers call it: queries packed one sequence after another, keys in pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from .attention import GRADIENTS, Attention, Function, Packed

SUFFIX = "-served"
_PAGE = 16  # tokens, the default of vLLM
_NEEDS = {"packed", "block_table"}
# Packed calls have these themselves, and pages have no backward.
_WITHOUT = {*_NEEDS, GRADIENTS, "mask", "dropout_p"}


def paged(
    k: Tensor, v: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts keys and values into pages in any order; returns pages of both, and the block table."""
    batch, seqlen, *row = k.shape
    count = -(-seqlen // size)
    order = torch.randperm(batch * count, generator=generator, device=generator.device).to(k.device)
    pages = []
    for tensor in (k, v):
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, count * size - seqlen))
        pages.append(padded.new_empty(batch * count, size, *row))
        pages[-1][order] = padded.reshape(pages[-1].shape)
    return pages[0], pages[1], order.view(batch, count).int()


def served(attention: Attention) -> Attention:
    """Returns an attention's calls on packed queries and shuffled pages, with its plain signature.

    Raises:
        UnavailableError: it takes no packed sequences, or no pages.
    """
    if not attention.takes >= _NEEDS:
        raise UnavailableError(f"{attention.name} takes no packed sequences in pages")

    def make() -> Function:
        function = attention.function

        def attend(
            q: Tensor, k: Tensor, v: Tensor, seqlens_k: Tensor | None = None, **options: Any
        ) -> Tensor:
            batch, seqlen_q = q.shape[:2]
            if seqlens_k is None:
                seqlens_k = torch.full((batch,), k.shape[1], dtype=torch.int32, device=q.device)
            pages = paged(k, v, _PAGE, torch.Generator().manual_seed(batch))
            starts = torch.nn.functional.pad(seqlens_k.cumsum(0, dtype=torch.int32), (1, 0))
            counts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
            packed = Packed(counts * seqlen_q, starts, seqlen_q, int(seqlens_k.max()))
            out = function(
                q.flatten(0, 1), *pages[:2], packed=packed, block_table=pages[2], **options
            )
            return out.view(q.shape)

        return attend

    title = f"{attention.title}, packed and paged"
    return dataclasses.replace(
        attention, name=attention.name + SUFFIX, title=title, make=make, bench=False,
        deterministic="", takes=(attention.takes | {"seqlens_k"}) - _WITHOUT,
    )  # fmt: skip
