"""Attention over the pages of a server, in the deterministic mode whatever that of the process."""

from __future__ import annotations

import torch

from ..interface.call import as_sink, resolve_options
from ..mode import deterministic_mode
from ..ops.autograd import run
from ..schemas import forward_call
from ..types import Lengths, Options


class PagedAttention:
    """The attention of one layer; arguments as of `flash_attn_varlen_func`.

    What is the same in all its calls is found once, to save time.
    """

    def __init__(
        self,
        softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        self._numbers = softmax_scale, window_size, softcap
        self._slopes = alibi_slopes
        self._options: dict[bool, Options] = {}

    def __call__(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        lengths: Lengths,
        causal: bool,
        learnable_sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns out (total_q, nheads, head_dim); a head_dim is a multiple of 8.

        pages are of keys and values, (pages, page_block_size, nheads_k, head_dim), and lengths have
        a block_table.
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
        return out  # type: ignore[no-any-return]
