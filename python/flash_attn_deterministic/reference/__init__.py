"""The kernels' reduction tree in plain torch: the CPU backend, and the reference of the tests.

The forward: keys are cut into splits of split_size tokens, counted from the sequence's own position
0, and a split into blocks of block_n. Blocks are visited last to first with FlashAttention-2's
online softmax; the un-normalised states of the splits are merged last to first; one division ends
it. `backward` describes the backward.

A row's bits depend on that row's inputs and on nothing else. So every step is an elementwise IEEE
operation, whose result cannot depend on vector width, tails or threads: no matmul (BLAS picks its
order of summation by shape) and no torch.sum, but one multiplication and one addition per index of
the contraction, in rising order. That makes it slow: 2 * 10^9 multiply-adds per second.

Three more rules keep bits independent of other rows:

- Keys beyond the used length never enter a product: each sequence is gathered first.
- Which fully masked blocks a row visits depends on its neighbours. Such a block keeps maximum and
  sum, and adds 0 times a value to the accumulator: at most a zero changes its sign. So an
  accumulator of -0 becomes an output of +0.
- A NaN in a result always has the same bits.
"""

from __future__ import annotations

from .backward import sink_backward
from .calls import (
    attention,
    attention_backward,
    finish_key_sums,
    kvcache_attention,
    restored,
    varlen_attention,
    varlen_attention_backward,
    with_residual,
)
from .formats import DEFAULT_FORMATS, Formats, Rounding
from .state import State, merge_state

__all__ = [
    "DEFAULT_FORMATS",
    "Formats",
    "Rounding",
    "State",
    "attention",
    "attention_backward",
    "finish_key_sums",
    "kvcache_attention",
    "merge_state",
    "restored",
    "sink_backward",
    "varlen_attention",
    "varlen_attention_backward",
    "with_residual",
]
