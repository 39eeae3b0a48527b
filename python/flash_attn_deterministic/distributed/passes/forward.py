"""The forward: this rank's rows on gathered keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..messages import exchange
from ..messages.ranks import Ranks
from ..planning.layout import Tokens, stored_tokens
from ..planning.plan import Call, divided, rows_on_keys
from ..planning.steps import head_slices, heads_of_forward
from .op_calls import Numbers, forward_call


def forward(
    ranks: Ranks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens_q: Tokens,
    tokens_k: Tokens,
    scores: Numbers,
    heads_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of this rank's rows.

    Args:
        ranks: over which the sequences are distributed.
        q: (tokens of q on this rank, nheads, head_dim).
        k: (tokens of k on this rank, nheads_k, head_dim).
        v: like k.
        tokens_q: layout of the tokens of q.
        tokens_k: layout of those of k and v.
        scores: of the call.
        heads_k: KV heads to gather at a time; 0: chosen from the sizes.

    Returns:
        out like q, and softmax_lse (tokens of q, nheads) in the computing dtype; 0 and +inf in rows
        of no sequence.
    """
    out = q.new_zeros(q.shape)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    softmax_lse = q.new_full(q.shape[:2], float("inf"), dtype=lse_dtype)

    def attend(
        calls: Sequence[Call], heads: slice, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        for call in calls:
            place = (call.rows, heads)
            out[place], softmax_lse[place] = forward_call(
                q[place], keys[call.keys], values[call.keys], call, scores
            )

    parts = divided(tokens_q, tokens_k, scores.mask, ranks.rank)
    if parts.travels:
        half = rows_on_keys(parts.q, parts.k, scores.mask, scores.key_align, ranks.rank)
        way = exchange.route(parts.k.layout, half.wanted, ranks.rank, half.room)
        group = q.shape[1] // k.shape[1]
        tokens = sum(map(stored_tokens, parts.k.layout))
        head_bytes = 2 * tokens * k.shape[2] * k.element_size()
        at_once = heads_of_forward(heads_k, k.shape[1], head_bytes)
        for span, (keys, values) in gathered(ranks, way, [k, v], k.shape[1], at_once, KEYS):
            attend(half.calls, slice(span.start * group, span.stop * group), keys, values)
            del keys, values
    attend(parts.calls, slice(None), k, v)
    return out, softmax_lse


KEYS = "keys and values"  # for errors


def gathered(
    ranks: Ranks,
    way: exchange.Route,
    tensors: Sequence[torch.Tensor],
    nheads_k: int,
    heads_k: int,
    what: str,
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Gathers a few KV heads at a time, the next ones while the caller computes.

    Args:
        ranks: the ranks.
        way: the exchange of tokens.
        tensors: (tokens, heads, ...); heads is a multiple of nheads_k.
        nheads_k: number of all KV heads.
        heads_k: KV heads at a time.
        what: description of the tensors, for errors.

    Yields:
        The KV heads, and the gathered tensors. The caller should delete these before it takes the
        next ones: memory for two more slices is allocated by then.
    """
    spans = head_slices(nheads_k, heads_k)
    coming = [exchange.start(ranks, way, of_heads(tensors, spans[0], nheads_k), what)]
    for span, after in zip(spans, [*spans[1:], None], strict=True):
        here = coming.pop().wait()
        if after is not None:
            coming.append(exchange.start(ranks, way, of_heads(tensors, after, nheads_k), what))
        yield span, here
        del here


def of_heads(tensors: Sequence[torch.Tensor], span: slice, nheads_k: int) -> list[torch.Tensor]:
    """Returns the parts of tensors that belong to some KV heads; see `gathered`."""
    groups = [tensor.shape[1] // nheads_k for tensor in tensors]
    return [
        tensor[:, span.start * group : span.stop * group]
        for tensor, group in zip(tensors, groups, strict=True)
    ]
