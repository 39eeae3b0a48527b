"""Layouts, gathered tokens and calls of ranks, compared with explicit masks."""

from __future__ import annotations

import itertools

import pytest
from flash_attn_deterministic.distributed.messages.exchange import route
from flash_attn_deterministic.distributed.planning.layout import (
    Layout,
    Piece,
    Tokens,
    dense_tokens,
    in_blocks,
    packed_tokens,
)
from flash_attn_deterministic.distributed.planning.plan import (
    Call,
    Mask,
    divided,
    keys_under_rows,
    rows_on_keys,
)
from flash_attn_deterministic.distributed.planning.runs import (
    cut_into_runs,
    find_runs,
    find_sums,
    suits,
)
from flash_attn_deterministic.distributed.planning.steps import head_slices, heads_of_forward

MASKS = {
    "full": Mask(-1, -1),
    "causal": Mask(-1, 0),
    "window": Mask(5, 3),
    "left": Mask(4, -1),
    "right": Mask(-1, 2),
    "narrow": Mask(0, 0),
}
LAYOUTS = {
    "contiguous": (dense_tokens(2, 6, 3, "contiguous"), dense_tokens(2, 6, 3, "contiguous")),
    "zigzag": (dense_tokens(2, 4, 3, "zigzag"), dense_tokens(2, 4, 3, "zigzag")),
    "more keys": (dense_tokens(1, 3, 4, "contiguous"), dense_tokens(1, 8, 4, "contiguous")),
    "more queries": (dense_tokens(1, 8, 4, "zigzag"), dense_tokens(1, 2, 4, "zigzag")),
    "packed": (
        packed_tokens((0, 3, 3, 20, 23), 8, 3, "contiguous", "q"),
        packed_tokens((0, 5, 6, 19, 24), 8, 3, "contiguous", "k"),
    ),
}
Seen = dict[tuple[int, int], set[int]]


def _seen(q: Tokens, k: Tokens, mask: Mask) -> Seen:
    """Maps (sequence, row) to the keys that it sees, by the definition."""
    seen: Seen = {}
    for sequence, (seqlen_q, seqlen_k) in enumerate(zip(q.lengths, k.lengths, strict=True)):
        for row in range(seqlen_q):
            position = row + seqlen_k - seqlen_q
            seen[sequence, row] = {
                key
                for key in range(seqlen_k)
                if (mask.left < 0 or key >= position - mask.left)
                and (mask.right < 0 or key <= position + mask.right)
            }
    return seen


def _call_sees(call: Call) -> dict[int, set[int]]:
    """Maps rows of a tensor to the keys of a tensor that they see in a call."""
    seen = {}
    for (q_begin, q_end), (k_begin, k_end) in zip(
        itertools.pairwise(call.starts_q), itertools.pairwise(call.starts_k), strict=True
    ):
        lengths = Tokens((q_end - q_begin,), ()), Tokens((k_end - k_begin,), ())
        for (_, row), keys in _seen(*lengths, call.mask).items():
            seen[call.rows.start + q_begin + row] = {
                call.keys.start + k_begin + key for key in keys
            }
    return seen


def _holds(pieces: tuple[Piece, ...]) -> dict[int, tuple[int, int]]:
    """Maps places in a tensor to tokens."""
    return {
        place: (piece.sequence, piece.begin + place - piece.at)
        for piece in pieces
        for place in range(piece.at, piece.at + piece.end - piece.begin)
    }


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tokens", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("align", [1, 4])
def test_rows_see_their_keys(tokens: tuple[Tokens, Tokens], mask: Mask, align: int) -> None:
    seen = _seen(*tokens, mask)
    for rank in range(len(tokens[0].layout)):
        whole = divided(*tokens, mask, rank)
        half = rows_on_keys(whole.q, whole.k, mask, align, rank)
        # Rows that see nothing need no call.
        own_tokens = _holds(tokens[0].layout[rank]).values()
        found: dict[tuple[int, int], set[tuple[int, int]]] = {token: set() for token in own_tokens}
        for calls, keys in ((half.calls, half.wanted[rank]), (whole.calls, tokens[1].layout[rank])):
            key_at, row_at = _holds(keys), _holds(tokens[0].layout[rank])
            for call in calls:
                for row, places in _call_sees(call).items():
                    # Only gathered tokens: rows must not see a gap.
                    found[row_at[row]] = {key_at[place] for place in places}
        own = {token: {(token[0], key) for key in seen[token]} for token in row_at.values()}
        assert found == own
        for part in half.parts:
            assert part.keys.begin % align == 0 or part.keys.begin == part.keys.end


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tokens", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("align", [1, 4])
def test_keys_are_seen_by_their_rows(tokens: tuple[Tokens, Tokens], mask: Mask, align: int) -> None:
    seen = _seen(*tokens, mask)
    for rank in range(len(tokens[0].layout)):
        whole = divided(*tokens, mask, rank)
        half = keys_under_rows(whole.q, whole.k, mask, align, rank)
        row_at, key_at = _holds(half.wanted[rank]), _holds(whole.k.layout[rank])
        found: dict[tuple[int, int], set[tuple[int, int]]] = {k: set() for k in key_at.values()}
        for call in half.calls:
            for row, places in _call_sees(call).items():
                for place in places:
                    found[key_at[place]].add(row_at[row])
        for key, rows in found.items():
            assert rows == {row for row in seen if row[0] == key[0] and key[1] in seen[row]}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tokens", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_each_row_is_in_one_sum_of_each_key(
    tokens: tuple[Tokens, Tokens], mask: Mask, chunk: int
) -> None:
    seen, keys_of = _seen(*tokens, mask), tokens[1]
    blocks = cut_into_runs(in_blocks(tokens[0], chunk), chunk)
    runs = [run for own in find_runs(blocks, keys_of, mask, chunk) for run in own]
    rows = {(*run.node, run.rows.sequence): run.rows for run in runs}
    assert len(rows) == len(runs)
    for (level, index, sequence), piece in rows.items():
        first, end = index << level, (index + 1) << level
        assert piece.begin == first * chunk
        assert piece.end == min(end * chunk, tokens[0].lengths[sequence])
    for rank in range(len(keys_of.layout)):
        for keys, chunks, sums in find_sums(blocks, keys_of, mask, chunk, rank).arrivals:
            assert chunks == -(-tokens[0].lengths[keys.sequence] // chunk)
            pieces = [rows[level, index, keys.sequence] for (level, index), _ in sums]
            found = {row for piece in pieces for row in range(*_span(piece))}
            for key in range(keys.begin, keys.end):
                assert found >= {
                    row for (s, row) in seen if s == keys.sequence and key in seen[s, row]
                }


def _span(piece: Piece) -> tuple[int, int]:
    return piece.begin, piece.end


def test_borders_in_chunks_are_left_to_the_other_backward() -> None:
    mask = Mask(-1, 0)
    for seqlen, good in ((4096, True), (2048, False), (40_000, True)):
        tokens = dense_tokens(1, seqlen, 4, "zigzag")
        assert suits(tokens, tokens, mask, 2048) == good


def test_layouts() -> None:
    assert dense_tokens(1, 4, 2, "contiguous").layout == (
        (Piece(0, 0, 4, 0),),
        (Piece(0, 4, 8, 0),),
    )
    assert dense_tokens(1, 4, 2, "zigzag").layout == (
        (Piece(0, 0, 2, 0), Piece(0, 6, 8, 2)),
        (Piece(0, 2, 6, 0),),
    )
    assert packed_tokens((0, 3, 7), 4, 2, "contiguous", "q").layout == (
        (Piece(0, 0, 3, 0), Piece(1, 0, 1, 3)),
        (Piece(1, 1, 4, 0),),
    )


def test_a_route_sends_each_token_once() -> None:
    have: Layout = ((Piece(0, 0, 3, 0),), (Piece(0, 3, 6, 0), Piece(1, 0, 2, 3)))
    want: Layout = ((Piece(0, 2, 5, 1), Piece(1, 1, 2, 4)), ())
    first, second = route(have, want, 0, 6), route(have, want, 1, 0)
    assert first.sent == ((slice(2, 3),), ())
    assert second.sent == ((slice(0, 2), slice(4, 5)), ())
    assert first.received == ((slice(1, 2),), (slice(2, 4), slice(4, 5)))
    assert (first.filled, second.filled) == (False, True)


@pytest.mark.parametrize("nheads_k", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("head_bytes", [0, 1, 2**25, 2**26, 2**27 + 1, 2**28, 2**28 + 1, 2**40])
def test_heads_of_a_forward(nheads_k: int, head_bytes: int) -> None:
    found = heads_of_forward(0, nheads_k, head_bytes)
    assert 1 <= found <= (nheads_k + 1) // 2
    assert found == 1 or found * head_bytes <= 2**28
    # One more would exceed the limit.
    assert found == (nheads_k + 1) // 2 or (found + 1) * head_bytes > 2**28
    slices = head_slices(nheads_k, found)
    assert [h for one in slices for h in range(one.start, one.stop)] == list(range(nheads_k))
    for given in range(1, nheads_k + 1):
        assert heads_of_forward(given, nheads_k, head_bytes) == given
