"""The backward that adds up dk and dv where the rows are, and sends the sums to the keys.

dk and dv of a key are a tree of sums over chunks of rows (ADR 17). Each rank computes its rows on
gathered keys, which gives dq, and sums of dk and dv over each aligned run of its chunks. The rank
of a key gets the sums of all runs that see it, adds them in the order of the tree, and rounds.

Where a border between ranks is inside a chunk, it moves to the chunk's end: the rows of the chunk
go to the rank that has the first of them, and their dq comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import tree
from ...types import Gradients
from ..messages import exchange
from ..messages.ranks import Ranks
from ..planning.layout import Tokens, in_blocks
from ..planning.plan import call_of, divided, rows_on_keys
from ..planning.runs import Sums, cut_into_runs, find_runs, find_sums
from .forward import KEYS, gathered
from .gathered_backward import whole_sequences, zeros_like
from .op_calls import KeySums, Numbers, Rows, backward_sums, finish

SUMS = "sums of dk and dv"  # for errors


def backward(
    ranks: Ranks,
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens_q: Tokens,
    tokens_k: Tokens,
    scores: Numbers,
    heads_k: int,
) -> Gradients:
    """Computes what `gathered_backward.backward` does."""
    gradients = dq, dk, dv = zeros_like(rows.q, k, v)
    parts = divided(tokens_q, tokens_k, scores.mask, ranks.rank)
    whole_sequences(parts.calls, rows, k, v, scores, gradients)
    if not parts.travels:
        return gradients
    chunk = tree.CHUNK_ROWS
    blocks = in_blocks(parts.q, chunk)
    own_rows, dq_rows = rows, dq
    if blocks != parts.q:
        own_rows = Rows(*_moved(ranks, parts.q, blocks, rows, "rows"))
        dq_rows = torch.zeros_like(own_rows.q)
    group, nheads_k = rows.q.shape[1] // k.shape[1], k.shape[1]
    pieces = cut_into_runs(blocks, chunk)
    runs = find_runs(pieces, parts.k, scores.mask, chunk)[ranks.rank]
    half = rows_on_keys(pieces, parts.k, scores.mask, scores.key_align, ranks.rank)
    sums = find_sums(pieces, parts.k, scores.mask, chunk, ranks.rank)
    way = exchange.route(parts.k.layout, half.wanted, ranks.rank, half.room)
    sums_way = exchange.route(sums.sent, sums.wanted, ranks.rank, sums.room)
    coming: list[tuple[slice, exchange.Arriving]] = []

    def add_up() -> None:
        span, arriving = coming.pop()
        _add_up(sums, arriving.wait(), scores, dk[:, span], dv[:, span])

    for span, (keys, values) in gathered(ranks, way, [k, v], nheads_k, heads_k, KEYS):
        heads = slice(span.start * group, span.stop * group)
        nothing = keys.new_empty((0, *keys.shape[1:]), dtype=torch.float32)
        of_runs = [[nothing], [nothing]]  # of dk, and of dv
        for part, run in zip(half.parts, runs, strict=True):
            call = call_of(part)
            if call is None:
                continue
            dq_rows[call.rows, heads], *found = backward_sums(
                own_rows.of_heads(heads).of(call), keys[call.keys], values[call.keys], call, scores
            )
            begin, end = (key - part.keys.begin for key in run.keys)
            for kept, one in zip(of_runs, found, strict=True):
                kept.append(one[begin:end])
        del keys, values
        if coming:
            add_up()
        sent = [torch.cat(kept) for kept in of_runs]
        coming.append((span, exchange.start(ranks, sums_way, sent, SUMS)))
    add_up()
    if blocks != parts.q:
        (dq_back,) = _moved(ranks, blocks, parts.q, [dq_rows], "dq")
        for piece in parts.q.layout[ranks.rank]:
            dq[piece.stored] = dq_back[piece.stored]
    return gradients


def _add_up(
    sums: Sums,
    arrived: Sequence[torch.Tensor],
    scores: Numbers,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Writes dk and dv of some KV heads from the sums that arrived."""
    for keys, chunks, places in sums.arrivals:
        count = keys.end - keys.begin
        found = {
            node: (arrived[0][at : at + count], arrived[1][at : at + count]) for node, at in places
        }
        total = tree.add_up(found, chunks, _added)
        if total is not None:
            dk[keys.stored], dv[keys.stored] = finish(total, dk, scores)


def _added(left: KeySums, right: KeySums) -> KeySums:
    return left[0] + right[0], left[1] + right[1]


def _moved(
    ranks: Ranks, here: Tokens, there: Tokens, tensors: Sequence[torch.Tensor], what: str
) -> list[torch.Tensor]:
    """Returns this rank's parts of tensors in another layout."""
    pieces = there.layout[ranks.rank]
    room = max((piece.stored.stop for piece in pieces), default=0)
    way = exchange.route(here.layout, there.layout, ranks.rank, room)
    return exchange.start(ranks, way, tensors, what).wait()
