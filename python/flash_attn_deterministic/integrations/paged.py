"""Attention over the pages of a server, in the deterministic mode whatever that of the process."""

from __future__ import annotations

import math

import torch

from ..errors import ArgumentError
from ..interface.call import as_sink, resolve_options
from ..mode import deterministic_mode
from ..ops.autograd import run
from ..schemas import forward_call
from ..types import Lengths, Options


class PagedAttention:
    """The attention of one layer; arguments as of `flash_attn_varlen_func`.

    What is the same in all its calls is found once, to save time. k_descale and v_descale are
    numbers, kept by CUDA graphs; k_descale becomes a factor of softmax_scale, and rounds no query.
    One that is not positive and finite raises ArgumentError.
    """

    def __init__(
        self,
        softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        k_descale: float = 1.0,
        v_descale: float = 1.0,
    ) -> None:
        for name, scale in (("k_descale", k_descale), ("v_descale", v_descale)):
            if not (scale > 0 and math.isfinite(scale)):
                raise ArgumentError(
                    f"{name}: expected a positive, finite scale of the layer's cache, got {scale}"
                )
        self._numbers = softmax_scale * k_descale, window_size, softcap
        self._v_descale = v_descale
        self._slopes = alibi_slopes
        self._options: dict[bool, Options] = {}

    def __call__(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        lengths: Lengths,
        causal: bool,
        learnable_sink: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns out (total_q, nheads, head_dim), or writes it to output, of any shape.

        pages are of keys and values, (pages, page_block_size, nheads_k, head_dim), like q or
        float8_e4m3fn, and lengths have a block_table. A head_dim is a multiple of 8.
        """
        if causal not in self._options:
            scale, window, softcap = self._numbers
            with deterministic_mode():
                _, options = resolve_options(query, 0.0, scale, causal, window, softcap, None)
            self._options[causal] = options
        if self._slopes is not None:
            self._slopes = self._slopes.to(query.device)
        sink = None if learnable_sink is None else as_sink(learnable_sink)
        inputs, options = (query, *pages), self._options[causal]
        call = forward_call(inputs, lengths, options, self._slopes, learnable_sink=sink)
        out, _ = run(call)
        rows: torch.Tensor = out if output is None else output
        if self._v_descale != 1.0:  # in float32, and rounded once, as v_descale of our functions
            torch.mul(out.view_as(rows), self._v_descale, out=rows)
        elif output is not None:
            rows.copy_(out.view_as(rows))
        return rows
