"""Ranks that are threads of one process on one device: what they send goes through queues.

The passes over ranks run as they are, with the messages that they would send, in that order. What
NCCL does is left out.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from flash_attn_deterministic import flash_attn_varlen_func
from flash_attn_deterministic.distributed.messages.ranks import Message, Ranks
from flash_attn_deterministic.distributed.passes import forward, summed_backward
from flash_attn_deterministic.distributed.passes.op_calls import Numbers, Rows
from flash_attn_deterministic.distributed.planning.layout import Layout, packed_tokens
from flash_attn_deterministic.distributed.planning.plan import Mask

# By kind, as an all-to-all may be waited for after a message that was sent later; then by ends.
Mail = dict[tuple[str, int, int], "queue.Queue[torch.Tensor]"]
Tensors = list[torch.Tensor]
NAMES = ("out", "softmax_lse", "dq", "dk", "dv")
WAIT = 60.0  # seconds, for a message


class Pending:
    """Stands for what is on its way, as `ranks.Pending` does."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait: Callable[[], Any] | None = wait

    def wait(self) -> Any:
        wait, self._wait = self._wait, None
        return None if wait is None else wait()


class ThreadRanks:
    """Stands for `Ranks` in a thread."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self.rank, self.size, self._mail = rank, size, mail

    def all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Pending:
        for to, part in enumerate(torch.split(rows, list(sent))):
            self._mail["all", self.rank, to].put(part)

        def wait() -> torch.Tensor:
            queues = [self._mail["all", by, self.rank] for by in range(self.size)]
            parts = [one.get(timeout=WAIT) for one in queues]
            assert [part.shape[0] for part in parts] == list(received), what
            return torch.cat(parts)

        return Pending(wait)

    def exchange(self, sent: Sequence[Message], received: Sequence[Message], what: str) -> Pending:
        for tensor, to in sent:
            assert tensor.is_contiguous()
            self._mail["one", self.rank, to].put(tensor)

        def wait() -> None:
            for tensor, by in received:
                tensor.copy_(self._mail["one", by, self.rank].get(timeout=WAIT))

        return Pending(wait)


def over_ranks(
    tensors: Tensors,
    starts_q: tuple[int, ...],
    starts_k: tuple[int, ...],
    size: int,
    order: str,
    scores: Numbers,
) -> dict[str, torch.Tensor]:
    """Attends packed sequences cut over ranks, forward and backward.

    Args:
        tensors: q, k, v and dout, whole: (tokens, heads, head_dim).
        starts_q: what cu_seqlens_q holds; all tokens are in a sequence.
        starts_k: what cu_seqlens_k holds.
        size: ranks.
        order: of the tokens.
        scores: of the call.

    Returns:
        out, softmax_lse, dq, dk and dv, whole.
    """
    tokens_q, tokens_k = (
        packed_tokens(starts, starts[-1] // size, size, order, "of a test")
        for starts in (starts_q, starts_k)
    )
    index_q, index_k = (
        _index(tokens.layout, starts)
        for tokens, starts in ((tokens_q, starts_q), (tokens_k, starts_k))
    )
    mail: Mail = {
        place: queue.Queue()
        for place in itertools.product(("all", "one"), range(size), range(size))
    }
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            ranks = cast(Ranks, ThreadRanks(rank, size, mail))
            q, k, v, dout = (
                tensor[index[rank].to(tensor.device)]
                for tensor, index in zip(tensors, (index_q, index_k, index_k, index_q), strict=True)
            )
            out, lse = forward.forward(ranks, q, k, v, tokens_q, tokens_k, scores, 1)
            rows = Rows(dout, q, out, lse)
            found[rank] = (
                out,
                lse,
                *summed_backward.backward(ranks, rows, k, v, tokens_q, tokens_k, scores, 1),
            )
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
    whole = {}
    for at, (name, index) in enumerate(
        zip(NAMES, (index_q, index_q, index_q, index_k, index_k), strict=True)
    ):
        parts = torch.cat([found[rank][at] for rank in range(size)])
        whole[name] = parts[torch.cat(index).argsort().to(parts.device)]
    return whole


def on_one(
    tensors: Tensors, starts_q: tuple[int, ...], starts_k: tuple[int, ...], scores: Numbers
) -> dict[str, torch.Tensor]:
    """Returns what one call gives, shaped as `over_ranks` has it."""
    *leaves, dout = tensors
    q, k, v = (leaf.detach().requires_grad_() for leaf in leaves)
    cu_seqlens = [
        torch.tensor(starts, dtype=torch.int32, device=q.device) for starts in (starts_q, starts_k)
    ]
    longest = [
        max(end - begin for begin, end in itertools.pairwise(starts))
        for starts in (starts_q, starts_k)
    ]
    function: Any = flash_attn_varlen_func
    out, lse, _ = function(
        *(q, k, v),
        *cu_seqlens,
        *longest,
        softmax_scale=scores.softmax_scale,
        causal=False,
        window_size=tuple(scores.mask),
        softcap=scores.softcap,
        split_size=scores.split_size,
        return_attn_probs=True,
    )
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    results = (out.detach(), lse.transpose(0, 1).contiguous(), *gradients)
    return dict(zip(NAMES, results, strict=True))


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


def scores_of(head_dim: int, mask: tuple[int, int], softcap: float, split_size: int) -> Numbers:
    """Returns what holds for a deterministic call."""
    return Numbers(head_dim**-0.5, Mask(*mask), softcap, split_size, True, True)


def _index(layout: Layout, starts: tuple[int, ...]) -> Tensors:
    """Returns for each rank which tokens it has, in its order."""
    return [
        torch.cat(
            [starts[piece.sequence] + torch.arange(piece.begin, piece.end) for piece in own]
            or [torch.arange(0)]
        )
        for own in layout
    ]
