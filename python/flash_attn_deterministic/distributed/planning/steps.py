"""How many heads are gathered at a time."""

from __future__ import annotations

import math


def head_slices(nheads_k: int, heads_k: int) -> list[slice]:
    """Cuts KV heads into slices of heads_k."""
    return [slice(h, min(h + heads_k, nheads_k)) for h in range(0, nheads_k, heads_k)]


# Most bytes of keys and values of a slice, if the caller gives no number of heads; a single head
# may have more. A rank holds three slices: one in use, one sent, one received.
_SLICE_BYTES = 256 * 2**20


def heads_of_forward(heads_k: int, nheads_k: int, head_bytes: int) -> int:
    """Returns how many KV heads a forward gathers at a time.

    The fewer heads a kernel has, the more SMs are idle at its end; but the more heads are gathered
    at first, the longer the wait before the first kernel. So at most half of them, rounded up.

    Args:
        heads_k: number given by the caller; 0: none.
        nheads_k: KV heads.
        head_bytes: keys and values of one head on all ranks, so that all ranks choose the same.
    """
    return heads_k or max(1, min(math.ceil(nheads_k / 2), _SLICE_BYTES // max(1, head_bytes)))
