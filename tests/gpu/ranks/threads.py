"""Ranks that are threads of one process on one device: what they send goes through queues.

The passes over ranks run as they are, with the messages that they would send, in that order. What
NCCL does is left out.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from flash_attn_deterministic import flash_attn_varlen_func
from flash_attn_deterministic.distributed import passes
from flash_attn_deterministic.distributed.layout import tokens_of
from flash_attn_deterministic.distributed.passes import Rows
from flash_attn_deterministic.distributed.plan import Shape, plan_of
from flash_attn_deterministic.distributed.ranks import Ranks
from flash_attn_deterministic.types import Options

# By the ranks at both ends.
Mail = dict[tuple[int, int], "queue.Queue[torch.Tensor]"]
Tensors = list[torch.Tensor]
NAMES = ("out", "softmax_lse", "dq", "dk", "dv")
WAIT = 60.0  # seconds, for a message


class ThreadRanks:
    """Stands for `Ranks` in a thread."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self.rank, self.size, self._mail = rank, size, mail

    def all_to_all(
        self,
        data: torch.Tensor,
        arrived: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        what: str,
    ) -> Any:
        for to, part in enumerate(torch.split(data, list(sent))):
            self._mail[self.rank, to].put(part)
        # Now, as a message may be waited for after one that was sent later.
        queues = [self._mail[by, self.rank] for by in range(self.size)]
        parts = [one.get(timeout=WAIT) for one in queues]

        def wait() -> None:
            assert [part.shape[0] for part in parts] == list(received), what
            torch.cat(parts, out=arrived)

        return SimpleNamespace(wait=wait)


def over_ranks(tensors: Tensors, shape: Shape, options: Options) -> Tensors:
    """Attends packed sequences cut over ranks, forward and backward.

    Args:
        tensors: q, k, v and dout, whole: (tokens, heads, head_dim).
        shape: of the call; all tokens are in a sequence.
        options: of the call.

    Returns:
        NAMES, whole.
    """
    size = shape.ranks
    index_q, index_k = (
        [tokens_of(layout, rank, tokens) for rank in range(size)]
        for layout, tokens in zip(shape.layouts(), (shape.tokens_q, shape.tokens_k), strict=True)
    )
    mail: Mail = {place: queue.Queue() for place in itertools.product(range(size), range(size))}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            ranks = cast(Ranks, ThreadRanks(rank, size, mail))
            q, k, v, dout = (
                tensor[index[rank].to(tensor.device)]
                for tensor, index in zip(tensors, (index_q, index_k, index_k, index_q), strict=True)
            )
            plan = plan_of(shape, rank)
            out, lse = passes.forward(ranks, plan, q, k, v, options)
            rows = Rows(dout, q, out, lse)
            found[rank] = (out, lse.t(), *passes.backward(ranks, plan, rows, k, v, options))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found.values():
        if isinstance(one, Exception):
            raise one
    whole = []
    for at, index in enumerate((index_q, index_q, index_q, index_k, index_k)):
        parts = torch.cat([found[rank][at] for rank in range(size)])
        whole.append(parts[torch.cat(index).argsort().to(parts.device)])
    return whole


def on_one(tensors: Tensors, shape: Shape, options: Options) -> Tensors:
    """Returns what one call gives, shaped as `over_ranks` has it."""
    *leaves, dout = tensors
    q, k, v = (leaf.detach().requires_grad_() for leaf in leaves)
    cu_seqlens = [
        torch.tensor(starts, dtype=torch.int32, device=q.device)
        for starts in (shape.starts_q, shape.starts_k)
    ]
    longest = [
        max(end - begin for begin, end in itertools.pairwise(starts))
        for starts in (shape.starts_q, shape.starts_k)
    ]
    function: Any = flash_attn_varlen_func
    out, lse, _ = function(
        *(q, k, v),
        *cu_seqlens,
        *longest,
        softmax_scale=options.softmax_scale,
        causal=False,
        window_size=(shape.left, shape.right),
        softcap=options.softcap,
        split_size=options.split_size,
        return_attn_probs=True,
    )
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return [out.detach(), lse.transpose(0, 1).contiguous(), *gradients]


def packed_call(
    lengths: Sequence[int],
    nheads: int,
    nheads_k: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensors, tuple[int, ...]]:
    """Draws q, k, v and dout of packed sequences, and says where these begin and end."""
    starts = (0, *itertools.accumulate(lengths))
    generator = torch.Generator().manual_seed(17)
    tensors = [
        torch.randn((starts[-1], heads, head_dim), generator=generator).to(device, dtype)
        for heads in (nheads, nheads_k, nheads_k, nheads)
    ]
    return tensors, starts
