"""The check of multi-head latent attention: a cache of 576 columns, of which 512 are the values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..features import CAUSAL
from . import layouts
from .call import Attention, Call, Tensors, part
from .check import Case, cases_of, expect_numbers, expect_same, make
from .sizes import Size

_QUERIES = 3
_HEADS = {"cpu": 6, "cuda": 72}  # on a GPU with all queries: rows of several tiles


def latent_cases(size: Size) -> Iterable[Case]:
    own = replace(size, configs=size.latent)
    return cases_of(own, size.features, split_size=(*size.splits, 0))


def latent(case: Case, attention: Attention, size: Size) -> None:
    """Sequences together in one piece, against what changes no bit of a row."""
    heads, seqlen = _HEADS[size.device], min(size.seqlen, 1100)
    call = make(
        case, attention, size,
        batch=3, seqlen_q=_QUERIES, seqlen_k=seqlen, nheads=heads, nheads_k=1,
    )  # fmt: skip
    lengths = [seqlen, seqlen // 2 + 1, seqlen - 9]

    def expect(what: str, own: Call, taken: list[int], page_size: int = 0) -> list[Tensors]:
        room = seqlen + 64
        parts = layouts.cached(own, taken, room=room, page_size=page_size, latent=True)
        for one, results in parts:
            expect_numbers(one, what, results)
        return [results for _, results in parts]

    whole = expect("together", call, lengths)
    for page_size in (0, *size.page_sizes):
        what = f"pages of {page_size}" if page_size else "a repeat"
        for own, expected in zip(expect(what, call, lengths, page_size), whole, strict=True):
            expect_same(call, f"{what} against the first run", own, expected)
    for index, length in enumerate(lengths):
        one = call.sequences([index])
        (own,) = expect("alone", one, [length])
        expect_same(one, f"sequence {index} alone against the batch", own, whole[index])
    for begin, end in ((0, 1), (heads // 3, heads // 2)):
        some, what = call.heads(begin, end), f"heads [{begin}, {end}) alone against all"
        for own, expected in zip(expect(what, some, lengths), whole, strict=True):
            expect_same(some, what, own, part(expected, h=slice(begin, end)))
    for row in range(_QUERIES) if case.feature in CAUSAL else ():
        one, what = call.queries(row, row + 1), f"query {row} alone against all {_QUERIES}"
        shorter = [length - _QUERIES + 1 + row for length in lengths]
        for own, expected in zip(expect(what, one, shorter), whole, strict=True):
            expect_same(one, what, own, part(expected, q=slice(row, row + 1)))
